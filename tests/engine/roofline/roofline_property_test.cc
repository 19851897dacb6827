// Laws that hold for every input.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "engine/roofline/roofline.h"
#include "engine/roofline/share_table.h"
#include "tests/support/seed.h"

namespace writescope::roofline {
namespace {

using Rng = std::mt19937_64;

// Times that differ by no more may be taken for equal.
constexpr double kIndifference = (1 + kIndifferent) * (1 + 1e-8);

// Mostly ordinary, over many orders of magnitude; `garbage` mixes in what telemetry must never do.
double RandomNumber(Rng& rng, double log10_min, double log10_max, bool garbage) {
  if (garbage && rng() % 3 == 0) {
    const double odd[] = {std::numeric_limits<double>::quiet_NaN(),
                          std::numeric_limits<double>::infinity(),
                          -std::numeric_limits<double>::infinity(),
                          -1.0,
                          0.0,
                          -0.0,
                          std::numeric_limits<double>::denorm_min(),
                          std::numeric_limits<double>::max(),
                          std::numeric_limits<double>::lowest()};
    return odd[rng() % std::size(odd)];
  }
  return std::pow(10, std::uniform_real_distribution<double>(log10_min, log10_max)(rng));
}

Rates RandomRates(Rng& rng, bool garbage) {
  Rates rates;
  rates.cpu_alone = RandomNumber(rng, 8, 12, garbage);
  rates.link_alone = RandomNumber(rng, 8, 12, garbage);
  std::uniform_real_distribution<double> contention(0.3, 1);
  rates.cpu_with_link =
      garbage ? RandomNumber(rng, 8, 12, true) : rates.cpu_alone * contention(rng);
  rates.link_with_cpu =
      garbage ? RandomNumber(rng, 8, 12, true) : rates.link_alone * contention(rng);
  rates.device = rng() % 2 == 0 ? 0 : RandomNumber(rng, 9, 13, garbage);
  return rates;
}

StepLoad RandomLoad(Rng& rng, bool garbage) {
  StepLoad load;
  load.spilled_bytes = RandomNumber(rng, 3, 12, garbage);
  if (rng() % 2 == 0) load.host_bytes = RandomNumber(rng, 3, 12, garbage);
  if (rng() % 2 == 0) load.stream_bytes = RandomNumber(rng, 3, 12, garbage);
  load.dense_seconds = RandomNumber(rng, -5, 0, garbage);
  if (rng() % 2 == 0) load.device_attention_seconds = RandomNumber(rng, -5, 0, garbage);
  if (rng() % 2 == 0) load.ahead_fraction = RandomNumber(rng, -2, 0, garbage);
  if (rng() % 2 == 0) load.handoff_seconds = RandomNumber(rng, -6, -2, garbage);
  return load;
}

bool InUnit(double share) { return share >= 0 && share <= 1; }

TEST(RooflineProperty, TotalForAnyInput) {
  Rng rng(testing_support::TestSeed());
  for (int i = 0; i < 200000; ++i) {
    const StepLoad load = RandomLoad(rng, true);
    const Rates rates = RandomRates(rng, true);
    const BestShareResult best = BestShare(load, rates);
    ASSERT_TRUE(InUnit(best.share)) << i;
    ASSERT_TRUE(std::isfinite(best.step_seconds) && best.step_seconds >= 0) << i;
    ASSERT_TRUE(std::isfinite(best.cpu_busy_seconds) && best.cpu_busy_seconds >= 0) << i;
    const double any_share = RandomNumber(rng, -3, 1, true);
    const double step = PredictStep(load, rates, any_share);
    ASSERT_TRUE(step >= 0 && step <= kNeverSeconds) << i;
    const double half_dense = RandomNumber(rng, -5, 0, true);
    const BestShareResult ping_pong = BestPingPong(load, rates, half_dense);
    ASSERT_TRUE(InUnit(ping_pong.share)) << i;
    ASSERT_TRUE(ping_pong.step_seconds >= 0 && ping_pong.step_seconds <= kNeverSeconds) << i;
    ASSERT_TRUE(std::isfinite(PredictPingPong(load, rates, half_dense, any_share))) << i;
    const ShareInterval interval = FeasibleShares(load);
    ASSERT_TRUE(InUnit(interval.min_share) && InUnit(interval.max_share)) << i;
    ASSERT_LE(interval.min_share, interval.max_share) << i;
  }
}

TEST(RooflineProperty, NoShareBeatsTheBest) {
  Rng rng(testing_support::TestSeed());
  for (int i = 0; i < 5000; ++i) {
    const StepLoad load = RandomLoad(rng, false);
    const Rates rates = RandomRates(rng, false);
    const BestShareResult best = BestShare(load, rates);
    const ShareInterval interval = FeasibleShares(load);
    ASSERT_GE(best.share, interval.min_share);
    ASSERT_LE(best.share, interval.max_share);
    ASSERT_DOUBLE_EQ(best.step_seconds, PredictStep(load, rates, best.share));
    for (int k = 0; k <= 200; ++k) {
      const double share = k / 200.0;
      ASSERT_GE(PredictStep(load, rates, share), best.step_seconds / kIndifference)
          << "case " << i << ": share " << share << " beats " << best.share;
    }
  }
}

TEST(RooflineProperty, PingPongNoShareBeatsTheBest) {
  Rng rng(testing_support::TestSeed());
  for (int i = 0; i < 5000; ++i) {
    const StepLoad load = RandomLoad(rng, false);
    const Rates rates = RandomRates(rng, false);
    const double half_dense = RandomNumber(rng, -5, 0, false);
    const BestShareResult best = BestPingPong(load, rates, half_dense);
    for (int k = 0; k <= 200; ++k) {
      ASSERT_GE(PredictPingPong(load, rates, half_dense, k / 200.0),
                best.step_seconds / kIndifference)
          << "case " << i << ": share " << k / 200.0 << " beats " << best.share;
    }
    // The device does all of its dense work, whatever it is hidden behind.
    ASSERT_GE(best.step_seconds, PredictStep(load, rates, best.share)) << i;
    ASSERT_GE(best.step_seconds, 2 * half_dense * (1 - 1e-12)) << i;
  }
}

TEST(RooflineProperty, FasterIsNeverSlowerAndMoreIsNeverFaster) {
  Rng rng(testing_support::TestSeed());
  for (int i = 0; i < 20000; ++i) {
    StepLoad load = RandomLoad(rng, false);
    // Rigid bytes or a slow device can force CPU and link to run together where, with much
    // contention, one after the other would be faster.
    load.host_bytes = load.stream_bytes = 0;
    Rates rates = RandomRates(rng, false);
    rates.device = 0;
    const double step = BestShare(load, rates).step_seconds;
    Rates faster = rates;
    faster.cpu_alone *= 1.5;
    faster.cpu_with_link *= 1.5;
    ASSERT_LE(BestShare(load, faster).step_seconds, step * kIndifference) << i;
    StepLoad longer = load;
    longer.spilled_bytes *= 1.3;
    ASSERT_GE(BestShare(longer, rates).step_seconds, step / kIndifference) << i;
    StepLoad more = load;
    more.dense_seconds *= 2;
    ASSERT_GE(BestShare(more, rates).step_seconds, step / kIndifference) << i;
  }
}

TEST(RooflineProperty, TheTableIsValidAndCloseToTheCurve) {
  Rng rng(testing_support::TestSeed());
  for (int i = 0; i < 300; ++i) {
    TableSpec spec;
    spec.rates = RandomRates(rng, i % 3 == 0);
    spec.rates.device = 0;
    spec.min_spilled_bytes = uint64_t{1} << (10 + rng() % 10);
    spec.max_spilled_bytes = spec.min_spilled_bytes << (rng() % 24);
    for (uint32_t batch = 1; batch <= 64; batch *= 4) {
      spec.batches.push_back({batch, RandomNumber(rng, -5, -1, i % 3 == 0), 0});
    }
    const ShareTable table = BuildShareTable(spec);
    ASSERT_TRUE(table.Validate().ok()) << table.Validate();
    if (i % 3 == 0) continue;
    for (const BatchLoad& batch : spec.batches) {
      for (int k = 0; k < 50; ++k) {
        const double at = std::uniform_real_distribution<double>(0, 1)(rng);
        StepLoad load;
        load.spilled_bytes = std::floor(static_cast<double>(spec.min_spilled_bytes) *
                                        std::pow(static_cast<double>(spec.max_spilled_bytes) /
                                                     static_cast<double>(spec.min_spilled_bytes),
                                                 at));
        load.dense_seconds = batch.dense_seconds;
        const BestShareResult best = BestShare(load, spec.rates);
        const double share =
            table.Lookup(batch.max_batch, static_cast<uint64_t>(load.spilled_bytes));
        ASSERT_LE(PredictStep(load, spec.rates, share), best.step_seconds * 1.03)
            << "case " << i << ": share " << share << " for " << best.share;
      }
    }
  }
}

TEST(RooflineProperty, LookupAndClampStayInRange) {
  Rng rng(testing_support::TestSeed());
  for (int i = 0; i < 5000; ++i) {
    ShareTable table;
    const int num_buckets = static_cast<int>(rng() % 4);
    for (int b = 0; b < num_buckets; ++b) {
      ShareBucket bucket{static_cast<uint32_t>(rng() % 100), {}};
      const int num_points = static_cast<int>(rng() % 6);
      for (int k = 0; k < num_points; ++k) {
        bucket.points.push_back({rng() >> (rng() % 64), RandomNumber(rng, -2, 1, true)});
      }
      table.buckets.push_back(bucket);
    }
    ASSERT_TRUE(InUnit(table.Lookup(static_cast<uint32_t>(rng() % 200), rng() >> (rng() % 64))));
    const ShareInterval interval{RandomNumber(rng, -2, 1, true), RandomNumber(rng, -2, 1, true)};
    ClampTable(table, interval);
    for (const ShareBucket& bucket : table.buckets) {
      for (const SharePoint& point : bucket.points) ASSERT_TRUE(InUnit(point.share));
    }
  }
}

}  // namespace
}  // namespace writescope::roofline
