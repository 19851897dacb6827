// The controller against machines whose best share is known.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "absl/strings/str_cat.h"
#include "tests/sim/rig.h"
#include "tests/support/seed.h"

namespace writescope::sim {
namespace {

struct Case {
  const char* name;
  Machine machine;
  Workload workload;
};

Machine WithRates(double c0, double c1, double p0, double p1) {
  Machine machine;
  machine.cpu_alone = c0;
  machine.cpu_with_link = c1;
  machine.link_alone = p0;
  machine.link_with_cpu = p1;
  return machine;
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  cases.push_back({"pcie5", Machine(), Workload()});
  cases.push_back({"pcie5, 1M tokens", Machine(), {89e9, 13e9, 0, 0, 128}});
  cases.push_back({"pcie4", WithRates(123e9, 111e9, 25e9, 22e9), {89e9, 13e9, 0, 0, 128}});
  cases.push_back({"pcie3", WithRates(82e9, 76e9, 12.4e9, 11.3e9), {60e9, 5e9, 0, 0, 64}});
  cases.push_back({"slow cpu", WithRates(10e9, 9e9, 53e9, 50e9), Workload()});
  cases.push_back({"much contention", WithRates(115e9, 70e9, 53e9, 30e9), Workload()});
  cases.push_back({"no contention", WithRates(50e9, 50e9, 50e9, 50e9), Workload()});
  cases.push_back({"just spilled", Machine(), {1.0e9, 13e9, 0, 0, 16}});
  cases.push_back({"streamed ahead", Machine(), {0.3e9, 13e9, 0, 0, 16}});
  cases.push_back({"rigid regions", Machine(), {20e9, 10e9, 0.3, 0.25, 16}});
  cases.push_back({"rigid against the best", Machine(), {20e9, 10e9, 0.8, 0.1, 16}});
  Case slow_device = {"slow device", WithRates(50e9, 48e9, 50e9, 45e9), Workload()};
  slow_device.machine.device = 60e9;
  cases.push_back(slow_device);
  Case small_ring = {"ring holds a tenth of what D would allow", Machine(), Workload()};
  small_ring.machine.dense_per_layer = 2e-3;
  small_ring.machine.ring_bytes = 10e6;
  cases.push_back(small_ring);
  // A laptop with a paced link: megabytes, and a device no faster than a core.
  Case laptop = {"laptop", WithRates(2.5e9, 2.2e9, 1.5e9, 1.4e9), {24e6, 6e6, 0, 0, 2}};
  laptop.machine.num_layers = 4;
  laptop.machine.device = 3e9;
  laptop.machine.dense_per_layer = 1e-3;
  laptop.machine.ring_bytes = 1 << 20;
  cases.push_back(laptop);
  Case busy_laptop = laptop;
  busy_laptop.name = "laptop, long dense work, small ring";
  busy_laptop.machine.dense_per_layer = 4e-3;
  busy_laptop.machine.ring_bytes = 256 << 10;
  cases.push_back(busy_laptop);
  return cases;
}

// A controller on the case's machine and load. `c` outlives the rig.
controller::ControlLoop& RunCase(Rig& rig, const Case& c, absl::Duration duration) {
  rig.worker.machine = c.machine;
  rig.worker.workload = [&c](absl::Duration) { return c.workload; };
  controller::ControlLoop& loop = rig.Start(LoopOptions());
  rig.RunFor(duration);
  return loop;
}

// In force and best, for the worker's present step.
void ExpectNearBest(const SimulatedWorker& worker, const std::string& what) {
  const Workload workload = worker.now();
  const KnownBest best = FindBest(worker.machine, workload);
  const double share = worker.share_in_force();
  const double seconds = RunStep(worker.machine, workload, share).step_seconds;
  EXPECT_LE(seconds, 1.03 * best.step_seconds)
      << what << ": share " << share << ", best " << best.share;
  // Where time hardly depends on the share, the share may be another.
  EXPECT_TRUE(std::abs(share - best.share) <= 0.05 || seconds <= 1.025 * best.step_seconds)
      << what << ": share " << share << ", best " << best.share << ", " << seconds << " s against "
      << best.step_seconds;
}

TEST(ConvergenceTest, FindsTheBestShareOfEveryMachine) {
  for (const Case& c : Cases()) {
    Rig rig;
    controller::ControlLoop& loop = RunCase(rig, c, absl::Seconds(20));
    EXPECT_EQ(loop.status().role, controller::Role::kActive) << c.name;
    EXPECT_GT(loop.status().updates_applied, 0u) << c.name;
    ExpectNearBest(rig.worker, c.name);
  }
}

TEST(ConvergenceTest, AStartWithoutSharingIsNoTrap) {
  for (const Case& c : Cases()) {
    for (const double start : {0.0, 1.0}) {
      Rig rig({.start_up_share = start});
      RunCase(rig, c, absl::Seconds(30));
      ExpectNearBest(rig.worker, absl::StrCat(c.name, ", started at share ", start));
    }
  }
}

// A machine so busy that dense work takes as long as the link needs for everything: the share goes
// to 0, and a step without a query for the CPU does not tell that the dense work is short again.
TEST(ConvergenceTest, DenseWorkThatWasSlowForAWhileIsNoTrap) {
  for (const Case& c : Cases()) {
    for (const bool from_start : {false, true}) {
      Rig rig;
      rig.worker.machine = c.machine;
      rig.worker.workload = [&c](absl::Duration) { return c.workload; };
      rig.Start(LoopOptions());
      if (!from_start) rig.RunFor(absl::Seconds(10));
      rig.worker.machine.dense_per_layer +=
          1.5 * c.workload.spilled_bytes / c.machine.link_alone / c.machine.num_layers;
      rig.RunFor(absl::Seconds(20));
      rig.worker.machine = c.machine;
      rig.RunFor(absl::Seconds(60));
      ExpectNearBest(rig.worker, absl::StrCat(c.name, from_start ? ", from the start" : ""));
    }
  }
}

TEST(ConvergenceTest, PredictsTheStepTime) {
  for (const Case& c : Cases()) {
    Rig rig;
    controller::ControlLoop& loop = RunCase(rig, c, absl::Seconds(20));
    const double measured = rig.worker.last_step().step_seconds;
    // The bench has a ring and a first layer without a head start; the roofline has not.
    EXPECT_NEAR(loop.status().last_step_predicted_seconds, measured, 0.12 * measured) << c.name;
  }
}

TEST(ConvergenceTest, TableIsInForceBeforeSequencesGetThere) {
  Rig rig;
  // From nothing spilled to 80 GB in two minutes, with the batch growing too.
  rig.worker.workload = [](absl::Duration since) {
    Workload workload;
    const double at = std::min(1.0, absl::ToDoubleSeconds(since) / 120);
    workload.spilled_bytes = 80e9 * at * at;
    workload.batch_size = 1 + static_cast<uint32_t>(63 * at);
    return workload;
  };
  controller::ControlLoop& loop = rig.Start(LoopOptions());
  rig.RunFor(absl::Seconds(20));
  const uint64_t pushes_before = loop.status().updates_applied;
  double worst = 1;
  for (int i = 0; i < 500; ++i) {
    rig.RunOnce();
    const Workload workload = rig.worker.now();
    const double seconds =
        RunStep(rig.worker.machine, workload, rig.worker.share_in_force()).step_seconds;
    worst = std::max(worst, seconds / FindBest(rig.worker.machine, workload).step_seconds);
  }
  EXPECT_LE(worst, 1.03);
  // Growth alone is no reason to push: renewals every 5 s, and D of new batch sizes.
  EXPECT_LE(loop.status().updates_applied - pushes_before, 45u);
}

// Steps until the step time is, and stays for ten steps, within 3 % of the best.
int StepsToFollow(Rig& rig, int limit) {
  const KnownBest best = FindBest(rig.worker.machine, rig.worker.now());
  const uint64_t start = rig.worker.num_steps();
  uint64_t good_since = 0;
  while (rig.worker.num_steps() < start + static_cast<uint64_t>(limit)) {
    rig.RunOnce();
    const double seconds =
        RunStep(rig.worker.machine, rig.worker.now(), rig.worker.share_in_force()).step_seconds;
    if (seconds > 1.03 * best.step_seconds) {
      good_since = 0;
    } else if (good_since == 0) {
      good_since = rig.worker.num_steps();
    } else if (rig.worker.num_steps() >= good_since + 10) {
      return static_cast<int>(good_since - start);
    }
  }
  return limit;
}

TEST(ConvergenceTest, FollowsADriftOfEitherSide) {
  const struct {
    const char* name;
    double cpu_factor;
    double link_factor;
  } drifts[] = {{"cpu halves", 0.5, 1},        {"cpu doubles", 2, 1},
                {"cpu at a quarter", 0.25, 1}, {"link halves", 1, 0.5},
                {"link doubles", 1, 2},        {"cpu down a fifth", 0.8, 1},
                {"cpu up a third", 1.33, 1},   {"link down a fifth", 1, 0.8}};
  for (const auto& drift : drifts) {
    for (const double noise : {0.0, 0.1}) {
      Rig rig({.seed = testing_support::TestSeed(), .rate_noise = noise});
      rig.Start(LoopOptions());
      rig.RunFor(absl::Seconds(20));
      rig.worker.machine.cpu_alone *= drift.cpu_factor;
      rig.worker.machine.cpu_with_link *= drift.cpu_factor;
      rig.worker.machine.link_alone *= drift.link_factor;
      rig.worker.machine.link_with_cpu *= drift.link_factor;
      // With noise, ten steps in a row within 3 % of the best need a good average first.
      EXPECT_LE(StepsToFollow(rig, 300), noise > 0 ? 100 : 40) << drift.name << ", noise " << noise;
    }
  }
}

TEST(ConvergenceTest, DirectionAfterTheLinkChanges) {
  Rig rig;
  rig.Start(LoopOptions());
  rig.RunFor(absl::Seconds(10));
  const double before = rig.worker.share_in_force();
  rig.worker.machine.link_alone /= 2;
  rig.worker.machine.link_with_cpu /= 2;
  rig.RunFor(absl::Seconds(20));
  const double slower_link = rig.worker.share_in_force();
  EXPECT_GT(slower_link, before + 0.05);
  rig.worker.machine.link_alone *= 4;
  rig.worker.machine.link_with_cpu *= 4;
  rig.RunFor(absl::Seconds(20));
  EXPECT_LT(rig.worker.share_in_force(), before - 0.05);
}

TEST(ConvergenceTest, StableUnderNoise) {
  Rig rig({.seed = testing_support::TestSeed(), .rate_noise = 0.1});
  controller::ControlLoop& loop = rig.Start(LoopOptions());
  rig.RunFor(absl::Seconds(30));
  const double best = FindBest(rig.worker.machine, rig.worker.now()).share;
  double low = 1, high = 0, last = rig.worker.share_in_force();
  int moves = 0;
  const uint64_t decisions_before = loop.status().decisions;
  for (int i = 0; i < 1200; ++i) {  // Five minutes, some 2,000 steps.
    rig.RunOnce();
    const double share = rig.worker.share_in_force();
    low = std::min(low, share);
    high = std::max(high, share);
    moves += std::abs(share - last) > 0.005 ? 1 : 0;
    last = share;
  }
  EXPECT_GT(loop.status().decisions - decisions_before, 1000u);
  EXPECT_GT(low, best - 0.05);
  EXPECT_LT(high, best + 0.05);
  // At most one visible move in 10 s, all of them within the bounds above.
  EXPECT_LE(moves, 30);
  EXPECT_LE(loop.status().cpu_changes + loop.status().link_changes, 4u) << "noise is no change";
}

TEST(ConvergenceTest, LearnsInMeetModeToo) {
  Rig rig({.meet = true});
  controller::ControlLoop& loop = rig.Start(LoopOptions());
  rig.RunFor(absl::Seconds(20));
  EXPECT_TRUE(loop.status().meet);
  // The table that is pushed agrees with where the two sides meet.
  EXPECT_NEAR(rig.worker.share_in_force(), rig.worker.last_step().observed_cpu_share, 0.03);
  ExpectNearBest(rig.worker, "meet");
}

TEST(ConvergenceTest, IdleWorkerKeepsItsTable) {
  Rig rig;
  controller::ControlLoop& loop = rig.Start(LoopOptions());
  rig.RunFor(absl::Seconds(10));
  rig.worker.serving = false;
  rig.RunFor(absl::Minutes(2));
  EXPECT_EQ(rig.worker.share_state().controller_id, "a") << "the lease was renewed without steps";
  EXPECT_EQ(loop.status().role, controller::Role::kActive);
  ExpectNearBest(rig.worker, "after idling");
}

}  // namespace
}  // namespace writescope::sim
