// What must never happen, whatever the worker says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "tests/sim/rig.h"
#include "tests/support/seed.h"

namespace writescope::sim {
namespace {

using controller::ControlLoop;
using controller::Role;

TEST(SafetyTest, GarbageNeverMakesAShareOutsideOfRange) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    Rig rig({.seed = testing_support::TestSeed() + seed,
             .rate_noise = 0.3,
             .garbage_probability = 0.7});
    ControlLoop& loop = rig.Start(LoopOptions());
    rig.RunFor(absl::Minutes(1));
    EXPECT_GT(loop.status().steps_garbage, 20u);
    EXPECT_EQ(loop.status().update_errors, 0u) << "the worker refused a table";
    for (const auto& applied : rig.worker.applied()) {
      ASSERT_TRUE(applied.table.Validate().ok()) << applied.table.Validate();
    }
    ASSERT_TRUE(std::isfinite(loop.status().last_decision.predicted_seconds));
  }
}

TEST(SafetyTest, SomeGarbageDoesNotSpoilTheShare) {
  Rig rig({.seed = testing_support::TestSeed(), .garbage_probability = 0.1});
  rig.Start(LoopOptions());
  rig.RunFor(absl::Minutes(1));
  const KnownBest best = FindBest(rig.worker.machine, rig.worker.now());
  EXPECT_LE(RunStep(rig.worker.machine, rig.worker.now(), rig.worker.share_in_force()).step_seconds,
            1.03 * best.step_seconds);
}

TEST(SafetyTest, UpdatesThatAllFailDoNotFillTheLog) {
  Rig rig({.lost_request_probability = 1});
  ControlLoop& loop = rig.Start(LoopOptions());
  ::testing::internal::CaptureStderr();
  rig.RunFor(absl::Seconds(150));
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_GT(loop.status().update_errors, 300u);
  int lines = 0;
  for (size_t at = log.find("share update failed"); at != std::string::npos;
       at = log.find("share update failed", at + 1)) {
    ++lines;
  }
  EXPECT_EQ(lines, 3) << log;  // At once, and each minute.
}

TEST(SafetyTest, ShadowNeverPushes) {
  Rig rig;
  controller::ControlOptions options = LoopOptions();
  options.shadow = true;
  ControlLoop& loop = rig.Start(options);
  rig.RunFor(absl::Minutes(1));
  EXPECT_EQ(rig.worker.set_calls(), 0u);
  EXPECT_EQ(loop.status().role, Role::kShadow);
  EXPECT_GT(loop.status().decisions, 50u);
  // It would have found the share.
  EXPECT_NEAR(loop.status().last_decision.share,
              FindBest(rig.worker.machine, rig.worker.now()).share, 0.05);
}

TEST(SafetyTest, ShadowWatchesBesideAnActiveOne) {
  Rig rig;
  controller::ControlOptions options = LoopOptions("shadow");
  options.shadow = true;
  ControlLoop& shadow = rig.Start(options);
  ControlLoop& active = rig.Start(LoopOptions("active"));
  rig.RunFor(absl::Minutes(1));
  EXPECT_EQ(shadow.status().role, Role::kShadow);
  EXPECT_EQ(active.status().role, Role::kActive);
  for (const auto& applied : rig.worker.applied()) EXPECT_EQ(applied.controller_id, "active");
}

TEST(SafetyTest, PinWins) {
  Rig rig;
  controller::ControlOptions options = LoopOptions();
  options.policy.pin_share =
      0.11;  // Far from the best, and slower than any the policy would allow.
  ControlLoop& loop = rig.Start(options);
  rig.RunFor(absl::Minutes(1));
  EXPECT_EQ(rig.worker.share_in_force(), 0.11);
  EXPECT_EQ(loop.status().last_decision.share, 0.11);
  EXPECT_NEAR(loop.status().last_decision.wanted_share, 0.11, 1e-12);
}

TEST(SafetyTest, PinNeedsNoSteps) {
  Rig rig;
  rig.worker.serving = false;
  controller::ControlOptions options = LoopOptions();
  options.policy.pin_share = 0.4;
  rig.Start(options);
  rig.RunFor(absl::Seconds(40));
  EXPECT_EQ(rig.worker.share_in_force(), 0.4);
}

TEST(SafetyTest, PinIsClampedByThePlacementOnly) {
  Rig rig;
  rig.worker.workload = [](absl::Duration) { return Workload{20e9, 10e9, 0.3, 0.25, 16}; };
  controller::ControlOptions options = LoopOptions();
  options.policy.pin_share = 1.0;
  rig.Start(options);
  rig.RunFor(absl::Seconds(10));
  EXPECT_DOUBLE_EQ(rig.worker.share_in_force(), 0.75);
}

TEST(SafetyTest, AnIntervalThatMovesDoesNotMakePushesFlap) {
  Rig rig;
  // The placement's interval closes and opens.
  rig.worker.workload = [](absl::Duration since) {
    Workload workload;
    workload.host_fraction = 0.35 + 0.3 * std::sin(absl::ToDoubleSeconds(since) / 20);
    workload.stream_fraction = 0.3;
    return workload;
  };
  ControlLoop& loop = rig.Start(LoopOptions());
  rig.RunFor(absl::Minutes(5));
  EXPECT_LE(loop.status().updates_applied + loop.status().updates_clamped, 140u);
  EXPECT_EQ(loop.status().updates_stale, 0u);
}

// By what it knows, the controller never asks for a step that is slower than with the lowest share.
class WorstCase final : public controller::ControlObserver {
 public:
  void OnStep(const controller::StepSample&, double) override {}
  void OnDecision(const controller::DecisionRecord& record) override {
    if (record.decision.action == controller::Action::kHold) return;
    const double ratio =
        record.decision.predicted_seconds / record.decision.predicted_lowest_seconds;
    worst_ratio = std::max(worst_ratio, ratio);
  }
  void OnTick(const controller::LoopStatus&) override {}
  double worst_ratio = 0;
};

TEST(SafetyTest, NeverPushesWhatIsSlowerThanNoSharing) {
  WorstCase worst;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    std::mt19937_64 rng(testing_support::TestSeed() + seed);
    std::uniform_real_distribution<double> factor(0.1, 1.5);
    Rig rig({.seed = seed, .rate_noise = 0.1, .start_up_share = 0.9});
    rig.Start(LoopOptions(), &worst);
    for (int i = 0; i < 20; ++i) {
      const Machine fresh;
      const double cpu = factor(rng);
      rig.worker.machine.cpu_alone = fresh.cpu_alone * cpu;
      rig.worker.machine.cpu_with_link = fresh.cpu_with_link * cpu;
      rig.RunFor(absl::Seconds(5));
    }
  }
  EXPECT_GT(worst.worst_ratio, 0);
  EXPECT_LE(worst.worst_ratio, 1.03 + 1e-9);
}

}  // namespace
}  // namespace writescope::sim
