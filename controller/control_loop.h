// ControlLoop: steps in, share updates out. One thread calls it; it blocks in the client only.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "controller/decision_log.h"
#include "controller/estimator.h"
#include "controller/policy.h"
#include "controller/worker_api.h"
#include "engine/base/clock.h"

namespace writescope::controller {

struct ControlOptions {
  std::string controller_id;
  // How long the worker goes by a table that is not renewed. It is renewed at a third of this.
  absl::Duration lease = absl::Seconds(15);
  // Between two looks at the worker; at most one push each.
  absl::Duration interval = absl::Milliseconds(250);
  // Decide and log, never push.
  bool shadow = false;
  PolicyOptions policy;
  EstimatorOptions estimator;

  // INVALID_ARGUMENT naming the option and its value.
  absl::Status Validate() const;
};

enum class Role {
  kNoWorker,  // None answers.
  kStandby,   // Another controller's lease runs.
  kShadow,
  kActive,
};
const char* RoleName(Role role);

// What the loop knows and has done, for metrics and tests. Counters since the start.
struct LoopStatus {
  Role role = Role::kNoWorker;
  std::string worker_id;
  bool meet = false;
  uint64_t generation = 0;      // In force at the worker, whoever's it is.
  uint64_t own_generation = 0;  // Of this controller's last accepted update; 0 without one.

  uint64_t connections = 0;
  uint64_t worker_restarts = 0;
  uint64_t steps_used = 0;
  uint64_t steps_ignored = 0;  // No decode step, or nothing spilled.
  uint64_t steps_garbage = 0;
  uint64_t steps_dropped = 0;  // Lost on the way.
  uint64_t cpu_changes = 0;
  uint64_t link_changes = 0;
  uint64_t decisions = 0;
  uint64_t updates_applied = 0;
  uint64_t updates_clamped = 0;
  uint64_t updates_stale = 0;
  uint64_t update_errors = 0;
  uint64_t log_errors = 0;

  roofline::Rates rates;
  double dense_seconds = 0;
  StepSample last_step;  // The last decode step that was used.
  double last_step_predicted_seconds = 0;
  Decision last_decision;
};

// Told of everything as it happens, on the loop's thread.
class ControlObserver {
 public:
  virtual ~ControlObserver() = default;
  virtual void OnStep(const StepSample& sample, double predicted_seconds) = 0;
  virtual void OnDecision(const DecisionRecord& record) = 0;
  virtual void OnTick(const LoopStatus& status) = 0;
};

class ControlLoop {
 public:
  // `observer` and `log` may be null; all references outlive the loop.
  ControlLoop(const ControlOptions& options, WorkerClient& client, Clock& clock,
              ControlObserver* observer, DecisionLog* log);

  // One interval: gathers steps, then looks, decides and perhaps pushes.
  void Tick();
  // Ticks until `stop` is set.
  void Run(const std::atomic<bool>& stop);

  const LoopStatus& status() const { return status_; }

 private:
  StepBatch GatherSteps();
  // False when the worker does not answer.
  bool LookAtWorker(WorkerState& state);
  // Forgets all that was learnt from the worker before.
  void StartAnew(const WorkerState& state);
  void Learn(const StepBatch& batch);
  Role RoleFor(const ShareState& share);
  PolicyInput MakeInput(const WorkerState& state) const;
  void DecideAndPush(const WorkerState& state);
  void Push(const Decision& decision, const ShareState& share, DecisionRecord& record);

  const ControlOptions options_;
  WorkerClient& client_;
  Clock& clock_;
  ControlObserver* const observer_;
  DecisionLog* const log_;

  Estimator estimator_;
  LoopStatus status_;
  // Of the worker that was last seen.
  absl::Time worker_start_;
  uint64_t worker_steps_ = 0;
  uint64_t stream_ = 0;
  bool profile_known_ = false;
  double handoff_seconds_ = 0;  // Of all layers of a step; from the worker's profile
  // Of this controller's pushes to that worker.
  uint64_t attempted_generation_ = 0;
  roofline::ShareTable attempted_table_;
  std::optional<absl::Time> accepted_at_;
  absl::Status logged_failure_;  // Of the update before; OK when it was answered.
  absl::Time logged_failure_at_ = absl::InfinitePast();
  // What shadow mode would have put in force.
  std::optional<roofline::ShareTable> shadow_table_;
  absl::Time shadow_at_;
  bool new_steps_ = false;
};

}  // namespace writescope::controller
