#include "engine/kernels/elementwise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "engine/base/bf16.h"
#include "tests/support/seed.h"

namespace writescope::kernels {
namespace {

std::vector<float> Normal(int64_t count, float sigma, std::mt19937_64& rng) {
  std::normal_distribution<float> normal(0, sigma);
  std::vector<float> values(count);
  for (float& value : values) value = normal(rng);
  return values;
}

TEST(RmsNormRow, MatchesTheTwin) {
  std::mt19937_64 rng(testing_support::TestSeed());
  for (const int64_t dim : {1, 15, 16, 17, 64, 128, 2048, 4099}) {
    for (const float sigma : {1e-3f, 1.0f, 100.0f}) {
      const std::vector<float> x = Normal(dim, sigma, rng);
      const std::vector<float> weight = Normal(dim, 1, rng);
      std::vector<double> want(dim);
      std::vector<float> got(dim);
      RmsNormRowRef(dim, x.data(), weight.data(), 1e-6f, want.data());
      RmsNormRow(dim, x.data(), weight.data(), 1e-6f, got.data());
      for (int64_t d = 0; d < dim; ++d) EXPECT_NEAR(got[d], want[d], 1e-6 * std::fabs(want[d]));
      std::vector<float> in_place = x;
      RmsNormRow(dim, in_place.data(), weight.data(), 1e-6f, in_place.data());
      EXPECT_EQ(in_place, got);
    }
  }
}

TEST(RmsNormRow, ZerosStayZeros) {
  const std::vector<float> x(40), weight(40, 1.0f);
  std::vector<float> out(40, 7.0f);
  RmsNormRow(40, x.data(), weight.data(), 1e-5f, out.data());
  EXPECT_EQ(out, x);
}

TEST(Rope, MatchesTheTwin) {
  std::mt19937_64 rng(testing_support::TestSeed());
  for (const int half : {1, 4, 16, 32, 64}) {
    std::vector<float> inv_freq(half);
    for (int i = 0; i < half; ++i) {
      inv_freq[i] = std::pow(1e4f, -static_cast<float>(i) / static_cast<float>(half));
    }
    for (const int64_t position : {0, 1, 63, 4095, 1048575}) {
      const std::vector<float> x = Normal(2 * half, 1, rng);
      std::vector<double> want(2 * half);
      RopeRowRef(position, half, inv_freq.data(), 1.25f, x.data(), want.data());
      std::vector<float> got = x, cosines(half), sines(half);
      RopeAngles(position, half, inv_freq.data(), 1.25f, cosines.data(), sines.data());
      RopeRow(half, cosines.data(), sines.data(), got.data());
      for (int i = 0; i < 2 * half; ++i) EXPECT_NEAR(got[i], want[i], 2e-6) << position;
      if (position == 0) {
        for (int i = 0; i < 2 * half; ++i) EXPECT_EQ(got[i], x[i] * 1.25f);
      }
    }
  }
}

// The first half pairs with the second: a rotation by a quarter turn shows which value goes where.
TEST(Rope, PairsValuesHalfTheDimApart) {
  std::vector<float> x = {1, 2, 3, 4};
  const std::vector<float> cosines = {0, 0}, sines = {1, 1};
  RopeRow(2, cosines.data(), sines.data(), x.data());
  EXPECT_EQ(x, (std::vector<float>{-3, -4, 1, 2}));
}

TEST(SwiGlu, MatchesTheTwinAndSurvivesLargeGates) {
  std::mt19937_64 rng(testing_support::TestSeed());
  std::vector<float> gate = Normal(1000, 5, rng);
  const std::vector<float> up = Normal(1000, 1, rng);
  gate[0] = -200;
  gate[1] = 200;
  gate[2] = 0;
  std::vector<double> want(1000);
  SwiGluRef(1000, gate.data(), up.data(), want.data());
  std::vector<float> got(1000);
  SwiGlu(1000, gate.data(), up.data(), got.data());
  for (int i = 0; i < 1000; ++i) {
    EXPECT_NEAR(got[i], want[i], 1e-6 * std::fabs(want[i]) + 1e-37) << gate[i];
  }
  SwiGlu(1000, gate.data(), up.data(), gate.data());
  EXPECT_EQ(gate, got);
}

void ExpectSameMax(const std::vector<float>& x) {
  const int64_t dim = static_cast<int64_t>(x.size());
  const RowMax got = MaxOfRow(dim, x.data());
  const RowMax want = MaxOfRowRef(dim, x.data());
  EXPECT_EQ(got.value, want.value);
  EXPECT_EQ(got.index, want.index) << "of " << dim;
  EXPECT_EQ(got.first_nan, want.first_nan) << "of " << dim;
}

TEST(MaxOfRow, MatchesTheTwin) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::mt19937_64 rng(testing_support::TestSeed());
  for (const int64_t dim : {1, 15, 16, 17, 1023, 1024, 1025, 5000}) {
    for (int i = 0; i < 20; ++i) {
      std::vector<float> x = Normal(dim, 1, rng);
      ExpectSameMax(x);
      for (float& value : x) value = std::round(value);  // Many are equal.
      ExpectSameMax(x);
      for (const float special : {-0.0f, kInf, -kInf, NAN}) {
        x[rng() % x.size()] = special;
        ExpectSameMax(x);
      }
    }
    for (const float all : {-kInf, NAN}) {
      ExpectSameMax(std::vector<float>(static_cast<size_t>(dim), all));
    }
  }
}

TEST(MaxOfRow, NothingAboveMinusInfinityIsIndexZero) {
  const float x[] = {NAN, -std::numeric_limits<float>::infinity()};
  EXPECT_EQ(MaxOfRowRef(2, x).index, 0);
  EXPECT_EQ(MaxOfRowRef(2, x).first_nan, 0);
}

TEST(Bf16ToFloats, WidensEveryValue) {
  std::vector<uint16_t> bits;
  for (int i = 0; i < 1 << 16; i += 7) bits.push_back(static_cast<uint16_t>(i));
  std::vector<float> got(bits.size());
  Bf16ToFloats(static_cast<int64_t>(bits.size()), reinterpret_cast<const std::byte*>(bits.data()),
               got.data());
  for (size_t i = 0; i < bits.size(); ++i) {
    EXPECT_EQ(std::bit_cast<uint32_t>(got[i]), static_cast<uint32_t>(bits[i]) << 16);
  }
}

}  // namespace
}  // namespace writescope::kernels
