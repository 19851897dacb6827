// Who is in force: leases, generations, restarts, lost messages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/sim/rig.h"
#include "tests/support/seed.h"

namespace writescope::sim {
namespace {

using controller::ControlLoop;
using controller::Role;

// Updates that were taken never go back, and change hands only when the other's lease has ended.
void ExpectOrderly(const SimulatedWorker& worker, absl::Duration lease) {
  const auto& applied = worker.applied();
  for (size_t i = 1; i < applied.size(); ++i) {
    ASSERT_GT(applied[i].generation, applied[i - 1].generation) << "update " << i;
    if (applied[i].controller_id != applied[i - 1].controller_id) {
      ASSERT_GE(applied[i].time, applied[i - 1].time + lease) << "update " << i;
    }
  }
}

TEST(LeaseTest, SecondControllerStandsByAndTakesOver) {
  Rig rig;
  ControlLoop& first = rig.Start(LoopOptions("first"));
  rig.RunFor(absl::Seconds(10));
  ControlLoop& second = rig.Start(LoopOptions("second"));
  rig.RunFor(absl::Minutes(2));
  EXPECT_EQ(first.status().role, Role::kActive);
  EXPECT_EQ(second.status().role, Role::kStandby);
  EXPECT_EQ(second.status().own_generation, 0u);
  EXPECT_GT(second.status().steps_used, 10u) << "a standby learns, so that it can take over";
  EXPECT_EQ(rig.worker.share_state().controller_id, "first");
  const uint64_t generation = rig.worker.share_state().generation;

  rig.Kill(first);
  rig.RunFor(absl::Seconds(9));  // Renewed at most 5 s ago, for 15 s.
  EXPECT_EQ(second.status().role, Role::kStandby);
  rig.RunFor(absl::Seconds(8));
  EXPECT_EQ(second.status().role, Role::kActive);
  EXPECT_EQ(rig.worker.share_state().controller_id, "second");
  EXPECT_GT(rig.worker.share_state().generation, generation);
  ExpectOrderly(rig.worker, absl::Seconds(15));
}

TEST(LeaseTest, TwoFromTheStartGiveOneInForce) {
  Rig rig;
  ControlLoop& first = rig.Start(LoopOptions("first"));
  ControlLoop& second = rig.Start(LoopOptions("second"));
  rig.RunFor(absl::Minutes(2));
  EXPECT_NE(first.status().role == Role::kActive, second.status().role == Role::kActive);
  ExpectOrderly(rig.worker, absl::Seconds(15));
  for (const auto& applied : rig.worker.applied()) {
    EXPECT_EQ(applied.controller_id, rig.worker.applied().front().controller_id);
  }
}

TEST(LeaseTest, TwoOfTheSameNameGiveOneInForce) {
  Rig rig;
  ControlLoop& first = rig.Start(LoopOptions("same"));
  ControlLoop& second = rig.Start(LoopOptions("same"));
  rig.RunFor(absl::Seconds(30));
  const uint64_t first_calls = first.status().updates_applied;
  const uint64_t second_calls = second.status().updates_applied;
  rig.RunFor(absl::Minutes(1));
  // One of them pushes, the other has stopped.
  EXPECT_NE(first.status().updates_applied > first_calls,
            second.status().updates_applied > second_calls);
  EXPECT_NE(first.status().role == Role::kActive, second.status().role == Role::kActive);
}

TEST(LeaseTest, RestartedControllerGoesOnAtOnce) {
  Rig rig;
  ControlLoop& first = rig.Start(LoopOptions("sidecar"));
  rig.RunFor(absl::Seconds(10));
  const uint64_t generation = rig.worker.share_state().generation;
  rig.Kill(first);
  ControlLoop& again = rig.Start(LoopOptions("sidecar"));
  rig.RunFor(absl::Seconds(5));
  EXPECT_EQ(again.status().role, Role::kActive);
  EXPECT_GT(again.status().own_generation, generation);
}

TEST(LeaseTest, WorkerGoesBackToItsOwnShareWithoutAController) {
  Rig rig({.start_up_share = 0.25});
  ControlLoop& loop = rig.Start(LoopOptions());
  rig.RunFor(absl::Seconds(10));
  EXPECT_GT(rig.worker.share_in_force(), 0.5);
  rig.Kill(loop);
  rig.RunFor(absl::Seconds(16));
  EXPECT_EQ(rig.worker.share_in_force(), 0.25);
}

TEST(LeaseTest, LeaseIsRenewedAtAThird) {
  Rig rig;
  controller::ControlOptions options = LoopOptions();
  options.lease = absl::Seconds(30);
  rig.Start(options);
  rig.RunFor(absl::Minutes(5));
  const auto& applied = rig.worker.applied();
  ASSERT_GT(applied.size(), 20u);
  for (size_t i = 1; i < applied.size(); ++i) {
    EXPECT_LE(applied[i].time - applied[i - 1].time, absl::Seconds(11)) << i;
  }
  // After the first moves nothing but renewals.
  EXPECT_LE(applied.size(), 36u);
}

TEST(LeaseTest, WorkerRestartStartsAnew) {
  Rig rig;
  ControlLoop& loop = rig.Start(LoopOptions());
  rig.RunFor(absl::Minutes(1));
  ASSERT_GT(loop.status().own_generation, 5u);
  // Another machine under the same address.
  rig.worker.Restart();
  rig.worker.machine.cpu_alone = 30e9;
  rig.worker.machine.cpu_with_link = 25e9;
  rig.RunFor(absl::Seconds(20));
  EXPECT_EQ(loop.status().worker_restarts, 1u);
  EXPECT_EQ(loop.status().worker_id, "simulated-2");
  EXPECT_EQ(loop.status().connections, 2u);
  EXPECT_EQ(rig.worker.share_state().controller_id, "a");
  EXPECT_LT(rig.worker.share_state().generation, 10u) << "generations start anew";
  EXPECT_NEAR(rig.worker.share_in_force(), FindBest(rig.worker.machine, rig.worker.now()).share,
              0.05);
  EXPECT_EQ(loop.status().updates_stale, 0u);
}

TEST(LeaseTest, StartsWithoutAWorker) {
  Rig rig;
  rig.worker.reachable = false;
  ControlLoop& loop = rig.Start(LoopOptions());
  rig.RunFor(absl::Minutes(5));
  EXPECT_EQ(loop.status().role, Role::kNoWorker);
  EXPECT_EQ(rig.worker.set_calls(), 0u);
  rig.worker.reachable = true;
  rig.RunFor(absl::Seconds(10));
  EXPECT_EQ(loop.status().role, Role::kActive);
  EXPECT_GT(loop.status().updates_applied, 0u);
}

TEST(LeaseTest, ReturnsAfterAnOutageLongerThanTheLease) {
  Rig rig;
  ControlLoop& loop = rig.Start(LoopOptions());
  rig.RunFor(absl::Seconds(10));
  const uint64_t generation = rig.worker.share_state().generation;
  rig.worker.reachable = false;
  rig.RunFor(absl::Seconds(40));
  EXPECT_EQ(loop.status().role, Role::kNoWorker);
  EXPECT_EQ(rig.worker.share_state().controller_id, "");
  rig.worker.reachable = true;
  rig.RunFor(absl::Seconds(5));
  EXPECT_EQ(loop.status().role, Role::kActive);
  EXPECT_EQ(loop.status().worker_restarts, 0u) << "it is the same worker";
  EXPECT_EQ(rig.worker.share_state().controller_id, "a");
  EXPECT_GT(rig.worker.share_state().generation, generation);
}

TEST(LeaseTest, LostMessagesOnlyDelay) {
  Rig rig({.seed = testing_support::TestSeed(),
           .lost_reply_probability = 0.4,
           .lost_request_probability = 0.3});
  ControlLoop& loop = rig.Start(LoopOptions());
  rig.RunFor(absl::Seconds(20));
  int without = 0;
  for (int i = 0; i < 1000; ++i) {
    rig.RunOnce();
    without += rig.worker.share_state().controller_id.empty() ? 1 : 0;
  }
  EXPECT_EQ(without, 0) << "the lease never ran out";
  EXPECT_GT(loop.status().update_errors, 5u);
  EXPECT_EQ(loop.status().updates_stale, 0u);
  EXPECT_NEAR(rig.worker.share_in_force(), FindBest(rig.worker.machine, rig.worker.now()).share,
              0.05);
  ExpectOrderly(rig.worker, absl::Seconds(15));
}

TEST(LeaseTest, GivesWayToAnOperatorAndComesBack) {
  Rig rig;
  ControlLoop& loop = rig.Start(LoopOptions());
  rig.RunFor(absl::Seconds(10));
  // An operator's client pushes after this controller's lease has been let go by an outage.
  rig.worker.reachable = false;
  rig.RunFor(absl::Seconds(16));
  rig.worker.reachable = true;
  const auto operator_client = rig.worker.Connect();
  controller::ShareUpdate update;
  update.controller_id = "operator";
  update.generation = rig.worker.share_state().generation + 1;
  update.table = roofline::ConstantTable(0.1);
  update.valid_for = absl::Seconds(60);
  ASSERT_EQ(operator_client->SetCpuShare(update)->outcome, controller::ShareOutcome::kApplied);
  rig.RunFor(absl::Seconds(30));
  EXPECT_EQ(loop.status().role, Role::kStandby);
  EXPECT_EQ(rig.worker.share_in_force(), 0.1);
  rig.RunFor(absl::Seconds(35));
  EXPECT_EQ(loop.status().role, Role::kActive);
  EXPECT_GT(rig.worker.share_in_force(), 0.5);
}

}  // namespace
}  // namespace writescope::sim
