#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <random>
#include <vector>

#include "engine/kernels/attention_partial.h"
#include "tests/support/seed.h"

namespace writescope::kernels {
namespace {

TEST(FinishPartial, EmptyIsZeroAndMinusInfinity) {
  const std::vector<float> o = {1, 2};
  std::vector<float> out = {7, 7};
  float lse = 7;
  FinishPartial(2, o.data(), kEmptyLse, 0.0f, out.data(), &lse);
  EXPECT_EQ(out, (std::vector<float>{0, 0}));
  EXPECT_EQ(lse, kEmptyLse);
}

TEST(FinishPartial, DividesAndTakesTheLogarithm) {
  const std::vector<float> o = {1, 3};
  std::vector<float> out(2);
  float lse = 0;
  FinishPartial(2, o.data(), 10.0f, 4.0f, out.data(), &lse);
  EXPECT_EQ(out, (std::vector<float>{0.25f, 0.75f}));
  EXPECT_EQ(lse, 12.0f);
}

TEST(FinishPartial, NanIsNotTakenForEmpty) {
  const std::vector<float> o = {NAN};
  float out = 0, lse = 0;
  FinishPartial(1, o.data(), kEmptyLse, NAN, &out, &lse);
  EXPECT_TRUE(std::isnan(out));
  EXPECT_TRUE(std::isnan(lse));
}

TEST(MergePartial, AnEmptySideChangesNothing) {
  std::vector<float> out = {3, -2};
  float lse = 1.5f;
  const std::vector<float> zero = {0, 0};
  MergePartial(2, out.data(), &lse, zero.data(), kEmptyLse);
  EXPECT_EQ(out, (std::vector<float>{3, -2}));
  EXPECT_EQ(lse, 1.5f);
  std::vector<float> empty = zero;
  float empty_lse = kEmptyLse;
  MergePartial(2, empty.data(), &empty_lse, out.data(), lse);
  EXPECT_EQ(empty, out);
  EXPECT_EQ(empty_lse, lse);
  std::vector<float> both = zero;
  float both_lse = kEmptyLse;
  MergePartial(2, both.data(), &both_lse, zero.data(), kEmptyLse);
  EXPECT_EQ(both, zero);
  EXPECT_EQ(both_lse, kEmptyLse);
}

TEST(MergeState, IsFinishThenMerge) {
  std::mt19937_64 random(testing_support::TestSeed());
  std::normal_distribution<float> normal;
  for (int round = 0; round < 200; ++round) {
    std::vector<float> out(37), o(37);
    for (float& value : out) value = normal(random);
    for (float& value : o) value = 20 * normal(random);
    float lse = round % 7 == 0 ? kEmptyLse : 5 * normal(random);
    const float m = 30 * normal(random);
    const float l = round % 5 == 0 ? 0.0f : 1 + std::fabs(10 * normal(random));
    std::vector<double> want(out.begin(), out.end()), finished(37);
    const std::vector<double> state(o.begin(), o.end());
    double want_lse = lse, finished_lse = 0;
    FinishPartial<double>(37, state.data(), m, l, finished.data(), &finished_lse);
    MergePartial<double>(37, want.data(), &want_lse, finished.data(), finished_lse);
    MergeState(37, out.data(), &lse, o.data(), m, l);
    if (std::isinf(want_lse)) {
      EXPECT_EQ(lse, kEmptyLse);
      continue;
    }
    EXPECT_NEAR(lse, want_lse, 1e-4);
    for (size_t d = 0; d < out.size(); ++d)
      EXPECT_NEAR(out[d], want[d], 1e-5 + 1e-5 * std::fabs(want[d]));
  }
}

// Either order, and what it comes to is what merging the one after the other comes to.
TEST(AddState, IsBothMerged) {
  std::mt19937_64 random(testing_support::TestSeed());
  std::normal_distribution<float> normal;
  for (int round = 0; round < 200; ++round) {
    struct State {
      std::vector<float> o = std::vector<float>(37);
      float m = kEmptyLse, l = 0;
    };
    State states[2];
    std::vector<double> want(37);
    double want_lse = kEmptyLse;
    for (int i = 0; i < 2; ++i) {
      if (round % (5 + i) == 0) continue;  // Nothing seen
      State& state = states[i];
      for (float& value : state.o) value = 20 * normal(random);
      state.m = 30 * normal(random);
      state.l = 1 + std::fabs(10 * normal(random));
      const std::vector<double> o(state.o.begin(), state.o.end());
      MergeState<double>(37, want.data(), &want_lse, o.data(), state.m, state.l);
    }
    const int first = round % 2;
    State& sum = states[first];
    const State& other = states[1 - first];
    AddState(37, sum.o.data(), &sum.m, &sum.l, other.o.data(), other.m, other.l);
    std::vector<float> out(37);
    float lse = 0;
    FinishPartial(37, sum.o.data(), sum.m, sum.l, out.data(), &lse);
    if (std::isinf(want_lse)) {
      EXPECT_EQ(lse, kEmptyLse);
      continue;
    }
    EXPECT_NEAR(lse, want_lse, 1e-4);
    for (size_t d = 0; d < out.size(); ++d) {
      EXPECT_NEAR(out[d], want[d], 1e-5 + 1e-5 * std::fabs(want[d]));
    }
  }
}

TEST(AddState, NanOfEitherSideStays) {
  for (const bool is_first : {true, false}) {
    float o[2] = {is_first ? NAN : 1.0f, 1}, m = 0, l = is_first ? NAN : 1.0f;
    const float other_o[2] = {is_first ? 1.0f : NAN, 1};
    AddState(2, o, &m, &l, other_o, 1.0f, is_first ? 1.0f : NAN);
    EXPECT_TRUE(std::isnan(o[0]));
    EXPECT_TRUE(std::isnan(l));
  }
}

TEST(MergeState, AValueThatOutweighsAllComesOutBitForBit) {
  const std::vector<float> o = {0.3f, -7.25f, 1e-3f};
  std::vector<float> out = {5, 6, 7};
  float lse = -2;
  MergeState(3, out.data(), &lse, o.data(), 300.0f, 1.0f);
  EXPECT_EQ(out, o);
  const std::vector<float> small = {1, 1, 1};
  MergeState(3, out.data(), &lse, small.data(), -300.0f, 1.0f);
  EXPECT_EQ(out, o);
  EXPECT_EQ(lse, 300.0f);
}

TEST(RowMix, EveryVariantIsTheSumInDouble) {
  std::mt19937_64 random(testing_support::TestSeed());
  std::normal_distribution<float> normal;
  for (const RowMixVariant& variant : RowMixVariants()) {
    if (variant.isa > DetectedCpuIsa()) continue;
    for (const int count : {0, 1, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 128, 511, 512}) {
      SCOPED_TRACE(testing::Message() << variant.name << ", " << count << " values");
      const float keep = normal(random), add = normal(random);
      std::vector<float> out(static_cast<size_t>(count) + 1), o(out.size());
      for (float& value : out) value = normal(random);
      for (float& value : o) value = normal(random);
      if (count > 4) {
        out[2] = INFINITY;
        o[3] = NAN;
      }
      const std::vector<float> before = out;
      variant.run(count, keep, out.data(), add, o.data());
      EXPECT_EQ(out.back(), before.back());  // What lies past the end
      for (int d = 0; d < count; ++d) {
        const double want = double{keep} * before[d] + double{add} * o[d];
        const double both = std::fabs(double{keep} * before[d]) + std::fabs(double{add} * o[d]);
        ASSERT_EQ(std::isnan(out[d]), std::isnan(want)) << d;
        if (std::isnan(want)) continue;
        if (std::isinf(want)) {
          ASSERT_EQ(out[d], want) << d;
          continue;
        }
        // Two products and a sum, each rounded once at most.
        ASSERT_NEAR(out[d], want, 1.5 * FLT_EPSILON * both) << d;
      }
    }
  }
}

TEST(MergePartial, NanOfEitherSideStays) {
  for (const float other_lse : {kEmptyLse, 2.0f, NAN}) {
    for (const bool nan_first : {true, false}) {
      const float value = std::isnan(other_lse) ? NAN : 0.0f;
      std::vector<float> out = {nan_first ? NAN : value};
      float lse = nan_first ? NAN : other_lse;
      const std::vector<float> other = {nan_first ? value : NAN};
      MergePartial(1, out.data(), &lse, other.data(), nan_first ? other_lse : NAN);
      EXPECT_TRUE(std::isnan(out[0])) << other_lse << nan_first;
      EXPECT_TRUE(std::isnan(lse)) << other_lse << nan_first;
    }
  }
}

TEST(MergePartial, CommutesAndKeepsTheTotalWeight) {
  std::mt19937_64 rng(testing_support::TestSeed());
  std::normal_distribution<double> normal;
  for (int i = 0; i < 1000; ++i) {
    // Weights far apart too: where one side leads by hundreds the other must vanish, not overflow.
    const double scale = i % 2 == 0 ? 2 : 300;
    const double lse_a = scale * normal(rng), lse_b = scale * normal(rng);
    const double a = normal(rng), b = normal(rng);
    double ab = a, ab_lse = lse_a, ba = b, ba_lse = lse_b;
    MergePartial(1, &ab, &ab_lse, &b, lse_b);
    MergePartial(1, &ba, &ba_lse, &a, lse_a);
    EXPECT_NEAR(ab, ba, 1e-14 * (std::fabs(a) + std::fabs(b)));
    EXPECT_NEAR(ab_lse, ba_lse, 1e-12);
    EXPECT_GE(ab_lse, std::max(lse_a, lse_b));
    EXPECT_LE(ab_lse, std::max(lse_a, lse_b) + 1 + 1e-12);
  }
}

}  // namespace
}  // namespace writescope::kernels
