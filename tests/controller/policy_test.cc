#include "controller/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "tests/support/seed.h"

namespace writescope::controller {
namespace {

using ::testing::HasSubstr;

PolicyInput Input() {
  PolicyInput input;
  input.spec.rates = {115e9, 94e9, 53e9, 42e9, 0};
  input.spec.batches = {{8, 0.006, 0, 1}, {64, 0.01, 0, 1}};
  input.batch_size = 8;
  input.spilled_bytes = 20000000000;
  input.num_steps_seen = 100;
  return input;
}

double BestShareNow(const PolicyInput& input) {
  return roofline::BestShare(
             LoadFor(input.spec, input.batch_size, static_cast<double>(input.spilled_bytes)),
             input.spec.rates)
      .share;
}

TEST(PolicyTest, FirstTableIsTheRooflines) {
  const Decision decision = Decide(PolicyOptions(), Input());
  EXPECT_EQ(decision.action, Action::kPush);
  EXPECT_TRUE(decision.table.Validate().ok()) << decision.table.Validate();
  EXPECT_NEAR(decision.share, BestShareNow(Input()), 0.005);
  EXPECT_NEAR(decision.share, decision.wanted_share, 1e-9);
  EXPECT_LT(decision.predicted_seconds, decision.predicted_lowest_seconds);
  // Batches and bytes that are not there yet are covered too.
  EXPECT_GT(decision.table.Lookup(64, uint64_t{80} << 30), 0.6);
  EXPECT_EQ(decision.table.Lookup(64, 1 << 20), 0);
}

TEST(PolicyTest, WaitsForSteps) {
  PolicyInput input = Input();
  input.num_steps_seen = 3;
  const Decision decision = Decide(PolicyOptions(), input);
  EXPECT_EQ(decision.action, Action::kHold);
  EXPECT_THAT(decision.reason, HasSubstr("only 3 of 4 steps"));
  EXPECT_TRUE(decision.table.buckets.empty());
  input.num_steps_seen = 4;
  EXPECT_EQ(Decide(PolicyOptions(), input).action, Action::kPush);
}

TEST(PolicyTest, DifferenceNearLooksFromHalfToFourTimesTheBytes) {
  const uint64_t now = 1 << 20;
  const auto table = [](double low, double middle, double high, double far) {
    roofline::ShareTable table;
    table.buckets = {{64,
                      {{now / 4, low},
                       {now / 2, low},
                       {now, middle},
                       {2 * now, middle},
                       {4 * now, high},
                       {64 * now, far}}}};
    return table;
  };
  const roofline::ShareTable flat = table(0.5, 0.5, 0.5, 0.5);
  EXPECT_NEAR(DifferenceNear(flat, table(0.4, 0.5, 0.5, 0.5), 8, now), 0.1, 1e-9);
  EXPECT_NEAR(DifferenceNear(flat, table(0.5, 0.7, 0.5, 0.5), 8, now), 0.2, 1e-9);
  EXPECT_NEAR(DifferenceNear(flat, table(0.5, 0.5, 0.8, 0.5), 8, now), 0.3, 1e-9);
  EXPECT_EQ(DifferenceNear(flat, table(0.5, 0.5, 0.5, 0.9), 8, now), 0);
  // Without spilled KV there is no place to be near to.
  EXPECT_NEAR(DifferenceNear(flat, table(0.5, 0.5, 0.5, 0.9), 8, 0), 0.4, 1e-9);
}

TEST(PolicyTest, HoldsWithinTheHysteresis) {
  PolicyInput input = Input();
  input.in_force = Decide(PolicyOptions(), input).table;
  EXPECT_EQ(Decide(PolicyOptions(), input).action, Action::kHold);
  input.spec.rates.cpu_alone *= 1.02;
  input.spec.rates.cpu_with_link *= 1.02;
  EXPECT_EQ(Decide(PolicyOptions(), input).action, Action::kHold);
  input.spec.rates.cpu_alone *= 1.1;
  input.spec.rates.cpu_with_link *= 1.1;
  const Decision moved = Decide(PolicyOptions(), input);
  EXPECT_EQ(moved.action, Action::kPush);
  EXPECT_THAT(moved.reason, HasSubstr("share moved by"));
  PolicyOptions lazy;
  lazy.hysteresis = 0.1;
  lazy.max_loss = 1;
  EXPECT_EQ(Decide(lazy, input).action, Action::kHold);
}

TEST(PolicyTest, ASmallShareMayBeWorthASmallMove) {
  PolicyInput input = Input();
  input.spec.rates = {2e9, 2e9, 50e9, 50e9, 0};  // A slow CPU: its best share is 0.04.
  input.in_force = roofline::ConstantTable(BestShareNow(input) + 0.01);
  const Decision decision = Decide(PolicyOptions(), input);
  EXPECT_EQ(decision.action, Action::kPush);
  EXPECT_GT(decision.predicted_lowest_seconds, decision.predicted_seconds);
}

TEST(PolicyTest, RenewsWithTheSameTable) {
  PolicyInput input = Input();
  input.in_force = Decide(PolicyOptions(), input).table;
  input.spec.rates.cpu_with_link *= 1.01;
  input.lease_due = true;
  const Decision decision = Decide(PolicyOptions(), input);
  EXPECT_EQ(decision.action, Action::kRenew);
  EXPECT_EQ(decision.table, *input.in_force);
  // Where it has become wrong for steps far from the present one, the renewal brings the new table.
  input.spec.batches[1].dense_seconds = 0.1;
  const Decision far = Decide(PolicyOptions(), input);
  EXPECT_EQ(far.action, Action::kRenew);
  EXPECT_NE(far.table, *input.in_force);
  EXPECT_NEAR(far.share, input.in_force->Lookup(8, input.spilled_bytes), 0.015);
}

TEST(PolicyTest, MovesInBoundedSteps) {
  PolicyOptions options;
  options.max_change = 0.15;
  options.guard = 1;
  for (const double start : {0.0, 1.0}) {  // Upwards and downwards.
    PolicyInput input = Input();
    input.in_force = roofline::ConstantTable(start);
    double last = start;
    int pushes = 0;
    for (; pushes < 20; ++pushes) {
      const Decision decision = Decide(options, input);
      if (decision.action == Action::kHold) break;
      EXPECT_LE(std::abs(decision.share - last), 0.15 + 1e-9);
      EXPECT_EQ(decision.num_limited > 0, std::abs(decision.wanted_share - last) > 0.15);
      if (decision.num_limited > 0) {
        EXPECT_LT(decision.predicted_wanted_seconds, decision.predicted_seconds);
      }
      last = decision.share;
      input.in_force = decision.table;
    }
    EXPECT_NEAR(last, BestShareNow(input), 0.02);
    EXPECT_GE(pushes, (std::abs(BestShareNow(input) - start) - 0.02) / 0.15);
  }
}

TEST(PolicyTest, TheGuardStandsAboveTheRateLimit) {
  PolicyInput input = Input();
  // The CPU has fallen to a tenth: 0.65 less 0.2 would be much slower than no sharing at all.
  input.in_force = roofline::ConstantTable(0.65);
  input.spec.rates.cpu_alone = 11e9;
  input.spec.rates.cpu_with_link = 9e9;
  const Decision decision = Decide(PolicyOptions(), input);
  EXPECT_EQ(decision.action, Action::kPush);
  EXPECT_GT(decision.num_guarded, 0);
  EXPECT_LE(decision.predicted_seconds, 1.03 * decision.predicted_lowest_seconds);
}

TEST(PolicyTest, ThePlacementsIntervalIsKept) {
  PolicyInput input = Input();
  input.allowed = {0.3, 0.5};
  const Decision decision = Decide(PolicyOptions(), input);
  EXPECT_GT(decision.num_clamped, 0);
  for (const roofline::ShareBucket& bucket : decision.table.buckets) {
    for (const roofline::SharePoint& point : bucket.points) {
      EXPECT_GE(point.share, 0.3);
      EXPECT_LE(point.share, 0.5);
    }
  }
  // What is in force was allowed once.
  input.in_force = roofline::ConstantTable(0.9);
  EXPECT_LE(Decide(PolicyOptions(), input).share, 0.5);
}

TEST(PolicyTest, PinStandsAboveAllButThePlacement) {
  PolicyInput input = Input();
  input.num_steps_seen = 0;
  PolicyOptions options;
  options.pin_share = 0.05;
  Decision decision = Decide(options, input);
  EXPECT_EQ(decision.action, Action::kPush);
  EXPECT_EQ(decision.share, 0.05);
  input.in_force = decision.table;
  EXPECT_EQ(Decide(options, input).action, Action::kHold);
  input.lease_due = true;
  EXPECT_EQ(Decide(options, input).action, Action::kRenew);
  // From anywhere at once.
  input.in_force = roofline::ConstantTable(0.9);
  EXPECT_EQ(Decide(options, input).share, 0.05);
  input.allowed = {0.3, 0.75};
  EXPECT_EQ(Decide(options, input).share, 0.3);
}

TEST(PolicyTest, OptionsAreChecked) {
  EXPECT_TRUE(PolicyOptions().Validate().ok());
  const auto message = [](auto&& change) {
    PolicyOptions options;
    change(options);
    const absl::Status status = options.Validate();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(message([](PolicyOptions& o) { o.hysteresis = -0.1; }),
              HasSubstr("hysteresis is -0.1"));
  EXPECT_THAT(message([](PolicyOptions& o) { o.pin_share = 40; }), HasSubstr("pin-share is 40"));
  EXPECT_THAT(message([](PolicyOptions& o) { o.pin_share = 1.0000001; }),
              HasSubstr("pin-share is 1.0000001"));
  EXPECT_THAT(
      message([](PolicyOptions& o) { o.pin_share = std::numeric_limits<double>::quiet_NaN(); }),
      HasSubstr("pin-share is nan"));
  EXPECT_THAT(message([](PolicyOptions& o) { o.max_change = 0.001; }), HasSubstr("max-change"));
  EXPECT_THAT(message([](PolicyOptions& o) { o.guard = 2; }), HasSubstr("guard is 2"));
  EXPECT_THAT(message([](PolicyOptions& o) { o.max_loss = -1; }), HasSubstr("max-loss is -1"));
}

// For any input: a valid table in range, inside the interval, and never slower than the guard
// allows.
TEST(PolicyTest, TotalAndSafeForAnyInput) {
  std::mt19937_64 rng(testing_support::TestSeed());
  const auto any_double = [&](double low, double high) -> double {
    const double odd[] = {std::numeric_limits<double>::quiet_NaN(),
                          std::numeric_limits<double>::infinity(), -1, 0};
    if (rng() % 8 == 0) return odd[rng() % std::size(odd)];
    return std::pow(10, std::uniform_real_distribution<double>(low, high)(rng));
  };
  for (int i = 0; i < 2000; ++i) {
    PolicyInput input;
    input.spec.rates = {any_double(8, 12), any_double(8, 12), any_double(8, 12), any_double(8, 12),
                        any_double(9, 13)};
    for (uint32_t batch = 1; batch <= 64; batch *= 8) {
      input.spec.batches.push_back(
          {batch, any_double(-5, 0), any_double(-5, 0), any_double(-2, 0)});
    }
    input.spec.max_spilled_bytes = rng() >> (rng() % 64);
    input.batch_size = static_cast<uint32_t>(rng() % 100);
    input.spilled_bytes = rng() >> (8 + rng() % 56);
    input.allowed = {any_double(-2, 0), any_double(-2, 0)};
    if (rng() % 2 == 0) input.in_force = roofline::ConstantTable(any_double(-2, 0));
    if (input.in_force.has_value() && rng() % 4 == 0) {
      input.in_force->buckets[0].points[0] = {rng() % 2, any_double(-2, 2)};
      input.in_force->buckets.resize(rng() % 3, input.in_force->buckets[0]);
    }
    input.lease_due = rng() % 2 == 0;
    input.num_steps_seen = 10;
    const Decision decision = Decide(PolicyOptions(), input);
    ASSERT_TRUE(decision.share >= 0 && decision.share <= 1) << i;
    ASSERT_TRUE(std::isfinite(decision.predicted_seconds)) << i;
    if (decision.action == Action::kHold) continue;
    ASSERT_TRUE(decision.table.Validate().ok()) << decision.table.Validate();
    if (decision.action == Action::kRenew) continue;
    if (input.spilled_bytes == 0) continue;
    ASSERT_LE(decision.predicted_seconds, 1.03 * decision.predicted_lowest_seconds * (1 + 1e-9))
        << i;
  }
}

}  // namespace
}  // namespace writescope::controller
