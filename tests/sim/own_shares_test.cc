// The engine's own shares, without a controller, on simulated machines: they follow what its steps
// show when the machine is another than at the start.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/clock.h"
#include "engine/roofline/share_table.h"
#include "engine/runtime/cpu_share_slot.h"
#include "engine/runtime/step_planner.h"
#include "tests/sim/simulated_worker.h"

namespace writescope::sim {
namespace {

// Steps until the shares have followed: D has to be learnt, and a table comes once a second.
constexpr int kStepsToFollow = 100;

Machine Pcie3() {
  Machine machine;
  machine.cpu_alone = 82e9;
  machine.cpu_with_link = 76e9;
  machine.link_alone = 12.4e9;
  machine.link_with_cpu = 11.3e9;
  return machine;
}

double DenseSeconds(const Machine& machine, uint32_t batch_size) {
  return machine.num_layers *
         (machine.dense_per_layer + machine.dense_per_layer_and_sequence * batch_size);
}

// Beside other programs: dense work takes so long that the link could stream everything meanwhile.
Machine Busy(Machine machine, const Workload& workload) {
  machine.dense_per_layer += 1.5 * workload.spilled_bytes / machine.link_alone / machine.num_layers;
  return machine;
}

// What an engine does about its shares, with a machine's steps for its own.
class OwnShares {
 public:
  OwnShares(const Machine& at_start, const Workload& workload)
      : OwnShares(Model(at_start, workload.batch_size), workload) {}

  double Share() {
    int64_t generation = 0;
    return slot_.Lookup(static_cast<int>(workload_.batch_size),
                        static_cast<int64_t>(workload_.spilled_bytes), &generation);
  }
  // The seconds of the last of as many steps.
  double Step(const Machine& machine, int count) {
    double seconds = 0;
    for (int i = 0; i < count; ++i) {
      const controller::StepSample sample = RunStep(machine, workload_, Share());
      seconds = sample.step_seconds;
      clock_.Advance(absl::Seconds(seconds));
      attention::AttentionStats stats;
      // The device tells when its work besides attention begins and ends, whoever has a query.
      stats.dense_s = DenseSeconds(machine, workload_.batch_size);
      stats.resident_bytes = static_cast<int64_t>(sample.resident_bytes);
      stats.link_bytes = static_cast<int64_t>(sample.link_bytes);
      stats.device_attention_s = sample.device_attention_seconds;
      auto table = planner_.Learn({.batch_size = static_cast<int>(workload_.batch_size),
                                   .predicted_seconds = seconds,
                                   .seconds = seconds},
                                  stats, absl::ToDoubleSeconds(clock_.Now() - began_));
      if (table.has_value()) {
        slot_.SetOwn(*std::move(table));
        ++num_tables_;
      }
    }
    return seconds;
  }
  runtime::CpuShareSlot& slot() { return slot_; }
  FakeClock& clock() { return clock_; }
  int num_tables() const { return num_tables_; }
  const Workload& workload() const { return workload_; }

 private:
  OwnShares(runtime::StepModel model, const Workload& workload)
      : workload_(workload),
        slot_(*model.NewTable(0), {}, clock_),
        planner_({}, std::move(model)) {}
  static runtime::StepModel Model(const Machine& machine, uint32_t max_batch) {
    runtime::StepModel model({.rates = {.cpu_alone = machine.cpu_alone,
                                        .cpu_with_link = machine.cpu_with_link,
                                        .link_alone = machine.link_alone,
                                        .link_with_cpu = machine.link_with_cpu,
                                        .device = machine.device},
                              .handoff_seconds = machine.handoff_per_layer * machine.num_layers,
                              .num_layers = machine.num_layers,
                              .ring_bytes = static_cast<int64_t>(machine.ring_bytes),
                              .host_kv_bytes = int64_t{120} << 30});
    for (uint32_t batch = 1;; batch = std::min(4 * batch, max_batch)) {
      model.LearnDense(static_cast<int>(batch), DenseSeconds(machine, batch));
      if (batch == max_batch) return model;
    }
  }

  const Workload workload_;
  FakeClock clock_;
  const absl::Time began_ = clock_.Now();
  runtime::CpuShareSlot slot_;
  runtime::StepPlanner planner_;
  int num_tables_ = 0;
};

struct Case {
  const char* name;
  Machine machine;
  Workload workload;
};
std::vector<Case> Cases() {
  std::vector<Case> cases = {{"pcie5", Machine(), Workload()},
                             {"pcie5, 1M tokens", Machine(), {89e9, 0, 0, 0, 128}},
                             {"pcie5, little spilled", Machine(), {3e9, 0, 0, 0, 12}},
                             {"pcie3", Pcie3(), {2e9, 0, 0, 0, 64}}};
  // A ring that keeps no link from what dense work has time for.
  for (Case& c : cases) c.machine.ring_bytes = c.workload.spilled_bytes / c.machine.num_layers;
  return cases;
}

// As on a machine that was never another.
void ExpectFollowed(const Machine& machine, OwnShares& shares, const std::string& what) {
  OwnShares always(machine, shares.workload());
  EXPECT_NEAR(shares.Share(), always.Share(), 0.03) << what;
  EXPECT_LE(shares.Step(machine, 1), 1.03 * always.Step(machine, 1)) << what;
}

TEST(OwnShares, ABusyStartIsNoTrap) {
  for (const Case& c : Cases()) {
    const Machine busy = Busy(c.machine, c.workload);
    OwnShares shares(busy, c.workload);
    EXPECT_LT(shares.Share(), 0.001) << c.name;
    shares.Step(busy, 20);
    EXPECT_LT(shares.Share(), 0.001) << c.name << ", still busy";
    shares.Step(c.machine, kStepsToFollow);
    ExpectFollowed(c.machine, shares, c.name);
  }
}

TEST(OwnShares, FollowAMachineThatIsBusyForAWhile) {
  for (const Case& c : Cases()) {
    OwnShares shares(c.machine, c.workload);
    const Machine busy = Busy(c.machine, c.workload);
    shares.Step(busy, kStepsToFollow);
    ExpectFollowed(busy, shares, std::string(c.name) + ", busy");
    shares.Step(c.machine, kStepsToFollow);
    ExpectFollowed(c.machine, shares, std::string(c.name) + ", again");
  }
}

TEST(OwnShares, StayWhereNothingChanges) {
  for (const Case& c : Cases()) {
    OwnShares shares(c.machine, c.workload);
    const double share = shares.Share();
    shares.Step(c.machine, 3 * kStepsToFollow);
    EXPECT_EQ(shares.Share(), share) << c.name;
    EXPECT_EQ(shares.num_tables(), 0) << c.name;
  }
}

TEST(OwnShares, WhatAnOperatorHasSetHoldsUntilItEnds) {
  const Case c = Cases()[0];
  OwnShares shares(Busy(c.machine, c.workload), c.workload);
  const auto reply = shares.slot().Offer({.controller_id = "operator:me",
                                          .generation = 1,
                                          .table = roofline::ConstantTable(0.25),
                                          .valid_for = absl::Hours(1)});
  ASSERT_TRUE(reply.ok()) << reply.status();
  for (int i = 0; i < kStepsToFollow; ++i) {
    shares.Step(c.machine, 1);
    ASSERT_EQ(shares.Share(), 0.25);
  }
  shares.clock().Advance(absl::Hours(1));
  ExpectFollowed(c.machine, shares, "afterwards");
}

}  // namespace
}  // namespace writescope::sim
