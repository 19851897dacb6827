// The test bench itself: its physical model obeys what every machine must.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/sim/simulated_worker.h"

namespace writescope::sim {
namespace {

TEST(MachineModelTest, ConservesBytesAndTime) {
  for (const double share : {0.0, 0.3, 0.7, 1.0}) {
    for (const bool meet : {false, true}) {
      const controller::StepSample s = RunStep(Machine(), Workload(), share, meet);
      EXPECT_NEAR(static_cast<double>(s.cpu_bytes + s.link_bytes), 20e9, 1e4);
      EXPECT_LE(s.both_busy_seconds, std::min(s.cpu_busy_seconds, s.link_busy_seconds) + 1e-12);
      EXPECT_LE(s.cpu_busy_seconds + s.dense_seconds, s.step_seconds + 1e-9);
      if (!meet) {
        EXPECT_NEAR(s.observed_cpu_share, share, 1e-6);
      }
    }
  }
}

TEST(MachineModelTest, OneSideAlone) {
  Machine machine;
  machine.handoff_per_layer = 0;
  const double dense = 48 * (200e-6 + 16 * 2e-6);
  EXPECT_NEAR(RunStep(machine, Workload(), 1).step_seconds, 20e9 / 115e9 + dense, 1e-6);
  // The link streams ahead during the dense work, but for the first layer's.
  EXPECT_NEAR(RunStep(machine, Workload(), 0).step_seconds, 20e9 / 53e9, 1e-4);
}

TEST(MachineModelTest, MeetFindsTheBestShare) {
  const KnownBest best = FindBest(Machine(), Workload());
  const controller::StepSample met = RunStep(Machine(), Workload(), 0, true);
  EXPECT_NEAR(met.observed_cpu_share, best.share, 0.02);
  EXPECT_NEAR(met.step_seconds, best.step_seconds, 0.01 * best.step_seconds);
  EXPECT_GT(best.share, 0.6);
  EXPECT_LT(best.share, 0.7);
}

TEST(MachineModelTest, ASmallRingLimitsTheHeadStart) {
  Machine machine;
  machine.dense_per_layer = 0.02;
  const double roomy = RunStep(machine, Workload(), 0).step_seconds;
  machine.ring_bytes = 1 << 20;
  EXPECT_GT(RunStep(machine, Workload(), 0).step_seconds, 1.2 * roomy);
}

TEST(MachineModelTest, RigidBytesStay) {
  Workload workload;
  workload.host_fraction = 0.3;
  workload.stream_fraction = 0.25;
  EXPECT_NEAR(RunStep(Machine(), workload, 0).observed_cpu_share, 0.3, 1e-6);
  EXPECT_NEAR(RunStep(Machine(), workload, 1).observed_cpu_share, 0.75, 1e-6);
  const double met = RunStep(Machine(), workload, 0, true).observed_cpu_share;
  EXPECT_GT(met, 0.6);
  EXPECT_LT(met, 0.7);
}

}  // namespace
}  // namespace writescope::sim
