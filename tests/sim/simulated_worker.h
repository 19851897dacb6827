// SimulatedWorker: a machine whose best share is known, behind the interface that the controller
// talks to. It has a physical model of its own, layer by layer and event by event; it shares no
// formula with engine/roofline. Runs on a FakeClock: time passes only while somebody waits for
// steps.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "controller/worker_api.h"
#include "engine/base/clock.h"
#include "engine/roofline/share_table.h"

namespace writescope::sim {

// Bytes per second and seconds.
struct Machine {
  double cpu_alone = 115e9;
  double cpu_with_link = 94e9;
  double link_alone = 53e9;
  double link_with_cpu = 42e9;
  double device = 2e12;  // Attention over device memory.
  double dense_per_layer = 200e-6;
  double dense_per_layer_and_sequence = 2e-6;
  double handoff_per_layer = 8e-6;
  double ring_bytes = 256 << 20;
  int num_layers = 48;
};

// What the steps are like at a time since the start.
struct Workload {
  double spilled_bytes = 20e9;
  double resident_bytes = 10e9;
  double host_fraction = 0;    // Of spilled_bytes, only the CPU can read them.
  double stream_fraction = 0;  // Only the link can carry them.
  uint32_t batch_size = 16;
};

// One step of the machine at a share: the physical model. With `meet` the share is not used: both
// sides take from one pool until it is empty.
controller::StepSample RunStep(const Machine& machine, const Workload& workload, double share,
                               bool meet = false);

// The best share by trying all, and the time of it.
struct KnownBest {
  double share;
  double step_seconds;
};
KnownBest FindBest(const Machine& machine, const Workload& workload);

class SimulatedWorker {
 public:
  struct Options {
    uint64_t seed = 1;
    double rate_noise = 0;  // Relative deviation of the machine's rates from step to step.
    bool meet = false;
    double lost_reply_probability = 0;  // The update is taken, the answer is not.
    double lost_request_probability = 0;
    double garbage_probability = 0;  // A step's telemetry is nonsense.
    double start_up_share = 0.5;
    // What the worker believes of its machine, as a factor to the machine's rates.
    double profile_factor = 0.7;
  };

  SimulatedWorker(FakeClock& clock, const Options& options);

  // Changeable at any time.
  Machine machine;
  std::function<Workload(absl::Duration since_start)> workload;
  bool serving = true;    // False: no steps, as without requests.
  bool reachable = true;  // False: the network is down; the machine goes on.

  // A controller's connection; the worker outlives it.
  std::unique_ptr<controller::WorkerClient> Connect();

  // A new process: nothing in force, step counter at 0, connections break.
  void Restart();

  Workload now() const { return workload(clock_.Now() - started_); }
  double share_in_force() const;
  const controller::ShareState& share_state() const { return share_; }
  // Every update that was applied or clamped: time, who, generation.
  struct Applied {
    absl::Time time;
    std::string controller_id;
    uint64_t generation;
    roofline::ShareTable table;
  };
  const std::vector<Applied>& applied() const { return applied_; }
  uint64_t num_steps() const { return num_steps_; }
  // Of the last step.
  const controller::StepSample& last_step() const { return last_step_; }
  uint64_t set_calls() const { return set_calls_; }

 private:
  class Connection;

  // Runs all steps that end by now.
  void CatchUp();
  absl::Duration UntilNextStepEnds();
  void Expire();
  controller::StepSample MakeStep();
  controller::StepSample Garbage(controller::StepSample sample);
  controller::ShareReply Offer(const controller::ShareUpdate& update);
  roofline::ShareInterval Allowed() const;
  double Noise();

  FakeClock& clock_;
  const Options options_;
  std::mt19937_64 rng_;
  absl::Time started_;
  absl::Time step_started_;
  bool step_running_ = false;
  controller::StepSample step_;  // Running.
  controller::StepSample last_step_;
  uint64_t num_steps_ = 0;
  uint64_t process_ = 1;
  uint64_t set_calls_ = 0;
  controller::ShareState share_;
  absl::Time lease_ends_ = absl::InfinitePast();
  std::vector<Applied> applied_;
  std::deque<controller::StepSample>
      history_;  // The newest steps, for connections that read later.
};

}  // namespace writescope::sim
