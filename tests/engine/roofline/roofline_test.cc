#include "engine/roofline/roofline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace writescope::roofline {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

// Planning rates of the PCIe 5 machine.
Rates PlanningRates() { return {115e9, 94e9, 53e9, 42e9, 0}; }

struct Row {
  const char* name;
  double spilled_gib;
  double dense_ms;
  double best_share;
  double best_ms;
  double stream_ms;
  double cpu_ms;
};

// Worked out by hand from the closed form, in gibibytes and milliseconds, rounded as printed.
constexpr Row kRows[] = {
    {"v2-lite bf16 16x8K", 3.1, 11.5, .56, 31, 63, 40},
    {"v2-lite bf16 128x8K", 29.6, 16, .67, 243, 600, 292},
    {"v2-lite bf16 8x128K", 29.6, 8.5, .68, 239, 600, 285},
    {"v2-lite int4 128x8K", 9.7, 7.4, .67, 81, 197, 98},
    {"qwen3 32x8K", 10.8, 8.8, .66, 91, 219, 110},
    {"qwen3 2x128K", 10.8, 3.9, .68, 88, 219, 105},
    {"qwen3 128x8K", 82.8, 11, .69, 660, 1677, 784},
    {"qwen3 8x128K", 82.8, 5.6, .69, 657, 1677, 779},
    {"mixtral 16x8K", 10.6, 12, .65, 91, 215, 111},
    {"mixtral 64x8K", 58.6, 12.6, .68, 470, 1187, 560},
    {"mixtral 96x8K", 90.6, 13, .69, 723, 1835, 859},
};

TEST(RooflineTest, ReproducesThePredictedStepTimes) {
  for (const Row& row : kRows) {
    SCOPED_TRACE(row.name);
    StepLoad load;
    load.spilled_bytes = row.spilled_gib * kGiB;
    load.dense_seconds = row.dense_ms * 1e-3;
    const BestShareResult best = BestShare(load, PlanningRates());
    // The table is rounded to 0.05 GiB, 0.5 ms and 0.005.
    const double rounding = 0.05 / row.spilled_gib;
    EXPECT_NEAR(best.share, row.best_share, 0.0051 + rounding / 4);
    EXPECT_NEAR(best.step_seconds * 1e3, row.best_ms, 0.51 + rounding * row.best_ms);
    EXPECT_NEAR(PredictStep(load, PlanningRates(), 0) * 1e3, row.stream_ms,
                0.51 + rounding * row.stream_ms);
    EXPECT_NEAR(PredictStep(load, PlanningRates(), 1) * 1e3, row.cpu_ms,
                0.51 + rounding * row.cpu_ms);
  }
}

TEST(RooflineTest, EqualsTheClosedFormWithoutRigidBytes) {
  const Rates r = PlanningRates();
  for (const double dense : {0.0, 0.001, 0.02, 0.5}) {
    for (const double spilled : {1e6, 1e8, 1e9, 7e9, 90e9, 1e13}) {
      StepLoad load;
      load.spilled_bytes = spilled;
      load.dense_seconds = dense;
      const double busy =
          std::max((spilled - r.link_alone * dense) / (r.cpu_with_link + r.link_with_cpu), 0.0);
      const BestShareResult best = BestShare(load, r);
      EXPECT_NEAR(best.share, r.cpu_with_link * busy / spilled, 1e-9);
      EXPECT_NEAR(best.step_seconds, dense + busy, 1e-9 * (dense + busy));
      EXPECT_NEAR(best.cpu_busy_seconds, busy, 1e-9 * (dense + busy));
    }
  }
}

TEST(RooflineTest, NothingToShareWhenTheLinkCanStreamAllAhead) {
  StepLoad load;
  load.dense_seconds = 0.01;
  load.handoff_seconds = 1e-4;
  load.spilled_bytes = 53e9 * 0.01;  // Exactly p0 * D.
  EXPECT_EQ(BestShare(load, PlanningRates()).share, 0);
  EXPECT_DOUBLE_EQ(BestShare(load, PlanningRates()).step_seconds, 0.01);
  load.spilled_bytes *= 1.5;
  EXPECT_GT(BestShare(load, PlanningRates()).share, 0.1);
}

TEST(RooflineTest, ASmallGainIsNotWorthAHandoff) {
  StepLoad load;
  load.spilled_bytes = 1.02 * 53e9 * 0.01;
  load.dense_seconds = 0.01;
  EXPECT_GT(BestShare(load, PlanningRates()).share, 0);
  load.handoff_seconds = 0.001;
  EXPECT_EQ(BestShare(load, PlanningRates()).share, 0);
}

TEST(RooflineTest, RigidBytesBoundTheShare) {
  StepLoad load;
  load.spilled_bytes = 10e9;
  load.host_bytes = 9e9;
  const ShareInterval mostly_host = FeasibleShares(load);
  EXPECT_DOUBLE_EQ(mostly_host.min_share, 0.9);
  EXPECT_DOUBLE_EQ(mostly_host.max_share, 1);
  EXPECT_DOUBLE_EQ(BestShare(load, PlanningRates()).share, 0.9);
  // Both until the link has done its gigabyte, then the CPU alone.
  const double both = 1e9 / 42e9;
  EXPECT_NEAR(BestShare(load, PlanningRates()).step_seconds, both + (9e9 - 94e9 * both) / 115e9,
              1e-9);

  load.host_bytes = 0;
  load.stream_bytes = 8e9;
  EXPECT_DOUBLE_EQ(FeasibleShares(load).max_share, 0.2);
  EXPECT_DOUBLE_EQ(BestShare(load, PlanningRates()).share, 0.2);
  // A share that cannot be is moved to the nearest that can.
  EXPECT_DOUBLE_EQ(PredictStep(load, PlanningRates(), 0.9),
                   PredictStep(load, PlanningRates(), 0.2));
}

TEST(RooflineTest, SlowDeviceAttentionMovesWorkToTheCpu) {
  StepLoad load;
  load.spilled_bytes = 10e9;
  Rates rates = {50e9, 50e9, 50e9, 50e9, 0};
  EXPECT_DOUBLE_EQ(BestShare(load, rates).share, 0.5);
  rates.device = 25e9;  // Slower than the link: the device is the bottleneck of what it is given.
  // x = s * S / 50 = (1 - s) * S / 25 at s = 2/3.
  EXPECT_NEAR(BestShare(load, rates).share, 2.0 / 3, 1e-9);
  EXPECT_NEAR(BestShare(load, rates).step_seconds, 10e9 * 2 / 3 / 50e9, 1e-9);
}

TEST(RooflineTest, WhereTimeIsEqualBothSidesFinishTogether) {
  StepLoad load;
  load.spilled_bytes = 10e9;
  load.device_attention_seconds = 1;  // Longer than any share takes.
  const Rates r = PlanningRates();
  EXPECT_DOUBLE_EQ(BestShare(load, r).share, 94.0 / 136);
  EXPECT_DOUBLE_EQ(BestShare(load, r).step_seconds, 1);
}

TEST(RooflineTest, WhenContentionEatsTheGainOneSideDoesAll) {
  StepLoad load;
  load.spilled_bytes = 10e9;
  const Rates cpu_better = {100e9, 40e9, 30e9, 20e9, 0};
  EXPECT_EQ(BestShare(load, cpu_better).share, 1);
  EXPECT_DOUBLE_EQ(BestShare(load, cpu_better).step_seconds, 0.1);
  const Rates link_better = {30e9, 10e9, 100e9, 40e9, 0};
  EXPECT_EQ(BestShare(load, link_better).share, 0);
}

TEST(RooflineTest, PingPongHidesTheDenseWork) {
  StepLoad load;
  load.spilled_bytes = 13.6e9;
  const Rates r = PlanningRates();
  const BestShareResult busy = BestPingPong(load, r, 0.01);
  EXPECT_DOUBLE_EQ(busy.share, 94.0 / 136);
  EXPECT_DOUBLE_EQ(busy.step_seconds, 0.1);  // S / (c1 + p1), above 2 * D.
  EXPECT_DOUBLE_EQ(BestPingPong(load, r, 0.08).step_seconds, 0.16);
  EXPECT_DOUBLE_EQ(PredictPingPong(load, r, 0.001, 1), 13.6e9 / 115e9);
}

TEST(RooflineTest, UnknownRates) {
  StepLoad load;
  load.spilled_bytes = 1e9;
  // One number of a pair stands for both.
  EXPECT_DOUBLE_EQ(BestShare(load, {50e9, 0, 0, 50e9, 0}).share, 0.5);
  EXPECT_EQ(BestShare(load, {0, 0, 50e9, 50e9, 0}).share, 0);
  EXPECT_EQ(BestShare(load, {50e9, 50e9, 0, 0, 0}).share, 1);
  const BestShareResult nobody = BestShare(load, {});
  EXPECT_EQ(nobody.step_seconds, kNeverSeconds);
  EXPECT_GE(nobody.share, 0);
  EXPECT_LE(nobody.share, 1);
}

TEST(RooflineTest, NothingSpilledIsResident) {
  StepLoad load;
  load.dense_seconds = 0.02;
  load.device_attention_seconds = 0.005;
  load.handoff_seconds = 0.001;
  const BestShareResult best = BestShare(load, PlanningRates());
  EXPECT_EQ(best.share, 0);
  EXPECT_DOUBLE_EQ(best.step_seconds, 0.025);
  EXPECT_DOUBLE_EQ(PredictStep(load, PlanningRates(), 1), 0.025);
}

TEST(RooflineTest, CopiesCostAFixedTime) {
  // 2.6 us and 54.9 GB/s give the measured 17.4 GB/s at 64 KiB and 51.4 at 2 MiB.
  EXPECT_NEAR(LinkRateForCopies(54.9e9, 64 << 10, 2.6e-6), 17.3e9, 0.3e9);
  EXPECT_NEAR(LinkRateForCopies(54.9e9, 2 << 20, 2.6e-6), 51.4e9, 0.2e9);
  EXPECT_EQ(LinkRateForCopies(54.9e9, 0, 2.6e-6), 54.9e9);
  EXPECT_EQ(LinkRateForCopies(0, 100, 2.6e-6), 0);
}

TEST(RooflineTest, ARingLimitsWhatGoesAhead) {
  // 1 GB/s for 10 ms: 10 MB over ten layers.
  EXPECT_EQ(AheadFraction(1e9, 0.010, 1e6, 10), 1);
  EXPECT_EQ(AheadFraction(1e9, 0.010, 5e5, 10), 0.5);
  EXPECT_EQ(AheadFraction(1e9, 0.010, 0, 10), 0);
  EXPECT_EQ(AheadFraction(1e9, 0, 0, 10), 1);
  EXPECT_EQ(AheadFraction(0, 0.010, 0, 10), 1);
  for (const double odd : {std::nan(""), HUGE_VAL, -1.0}) {
    for (const double fraction : {AheadFraction(odd, 1, 1, 1), AheadFraction(1, odd, 1, 1),
                                  AheadFraction(1, 1, odd, 1), AheadFraction(1, 1, 1, -1)}) {
      EXPECT_GE(fraction, 0);
      EXPECT_LE(fraction, 1);
    }
  }
}

}  // namespace
}  // namespace writescope::roofline
