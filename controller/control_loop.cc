#include "controller/control_loop.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/roofline/roofline.h"

namespace writescope::controller {
namespace {

// A table covers steps that are not there yet, so that it is in force before sequences have grown.
constexpr uint64_t kMinSpilledBytes = 64 << 10;
constexpr uint64_t kGrowth = 4;
constexpr uint32_t kMinBatchCovered = 64;
constexpr uint32_t kMaxBatchCovered = 1 << 16;
// That say the same.
constexpr absl::Duration kBetweenWarnings = absl::Minutes(1);

double ObservedShare(const StepSample& sample) {
  const double done =
      static_cast<double>(sample.cpu_bytes) + static_cast<double>(sample.link_bytes);
  return done > 0 ? static_cast<double>(sample.cpu_bytes) / done : 0;
}

absl::Status CheckDuration(const char* name, absl::Duration value, absl::Duration min,
                           absl::Duration max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " is ", absl::FormatDuration(value),
                                                 ", it has to be from ", absl::FormatDuration(min),
                                                 " to ", absl::FormatDuration(max)));
}

const char* OutcomeName(ShareOutcome outcome) {
  switch (outcome) {
    case ShareOutcome::kApplied:
      return "applied";
    case ShareOutcome::kClamped:
      return "clamped";
    case ShareOutcome::kStale:
      return "stale";
  }
  return "unknown";
}

}  // namespace

const char* RoleName(Role role) {
  switch (role) {
    case Role::kNoWorker:
      return "no worker";
    case Role::kStandby:
      return "standby";
    case Role::kShadow:
      return "shadow";
    case Role::kActive:
      return "active";
  }
  return "unknown";
}

absl::Status ControlOptions::Validate() const {
  if (controller_id.empty() || controller_id.size() > 128) {
    return absl::InvalidArgumentError(absl::StrCat("controller-id has ", controller_id.size(),
                                                   " bytes, it has to have 1 to 128"));
  }
  RETURN_IF_ERROR(CheckDuration("interval", interval, absl::Milliseconds(10), absl::Minutes(10)));
  RETURN_IF_ERROR(CheckDuration("lease", lease, absl::Seconds(1), absl::Hours(24)));
  if (lease < 4 * interval) {
    return absl::InvalidArgumentError(absl::StrCat(
        "lease is ", absl::FormatDuration(lease), ", it has to be at least four intervals of ",
        absl::FormatDuration(interval), " or it ends between two renewals"));
  }
  return policy.Validate();
}

ControlLoop::ControlLoop(const ControlOptions& options, WorkerClient& client, Clock& clock,
                         ControlObserver* observer, DecisionLog* log)
    : options_(options),
      client_(client),
      clock_(clock),
      observer_(observer),
      log_(log),
      estimator_(options.estimator) {}

void ControlLoop::Run(const std::atomic<bool>& stop) {
  while (!stop.load(std::memory_order_relaxed)) Tick();
}

void ControlLoop::Tick() {
  const StepBatch batch = GatherSteps();
  const Role before = status_.role;
  WorkerState state;
  if (!batch.connected || !LookAtWorker(state)) {
    status_.role = Role::kNoWorker;
  } else {
    Learn(batch);
    status_.role = RoleFor(state.share);
    DecideAndPush(state);
  }
  if (status_.role != before) {
    Log(LogLevel::kInfo, "role",
        {{"role", RoleName(status_.role)},
         {"worker_id", status_.worker_id},
         {"generation", status_.generation}});
  }
  status_.rates = estimator_.rates();
  status_.dense_seconds = estimator_.DenseSeconds(status_.last_step.batch_size);
  status_.cpu_changes = estimator_.cpu_changes();
  status_.link_changes = estimator_.link_changes();
  if (observer_ != nullptr) observer_->OnTick(status_);
}

StepBatch ControlLoop::GatherSteps() {
  const absl::Time deadline = clock_.Now() + options_.interval;
  StepBatch all;
  while (true) {
    StepBatch batch = client_.WatchSteps(std::max(deadline - clock_.Now(), absl::ZeroDuration()));
    const bool nothing_came = batch.steps.empty();
    if (batch.stream != all.stream) all.steps.clear();  // Perhaps of a worker that is gone.
    all.stream = batch.stream;
    all.connected = batch.connected;
    all.dropped += batch.dropped;
    all.steps.insert(all.steps.end(), batch.steps.begin(), batch.steps.end());
    if (nothing_came || clock_.Now() >= deadline) break;
  }
  status_.steps_dropped += all.dropped;
  if (all.stream != stream_) {
    stream_ = all.stream;
    ++status_.connections;
  }
  return all;
}

bool ControlLoop::LookAtWorker(WorkerState& state) {
  absl::StatusOr<WorkerState> answer = client_.GetWorkerState();
  if (!answer.ok()) {
    Log(LogLevel::kDebug, "worker state", {{"status", answer.status().ToString()}});
    return false;
  }
  state = *std::move(answer);
  const bool same_worker = state.worker_id == status_.worker_id &&
                           state.start_time == worker_start_ && state.steps_total >= worker_steps_;
  if (!same_worker) StartAnew(state);
  worker_steps_ = state.steps_total;
  status_.generation = state.share.generation;
  status_.meet = state.meet;
  if (!profile_known_) {
    absl::StatusOr<roofline::MachineProfile> profile = client_.GetMachineProfile();
    if (profile.ok()) {
      estimator_.Seed(profile->rates);
      handoff_seconds_ = profile->handoff_per_layer_seconds * profile->num_layers;
      profile_known_ = true;
    }
  }
  return true;
}

void ControlLoop::StartAnew(const WorkerState& state) {
  if (!status_.worker_id.empty()) ++status_.worker_restarts;
  Log(LogLevel::kInfo, "worker found",
      {{"worker_id", state.worker_id},
       {"model", state.model},
       {"device", state.device},
       {"version", state.version},
       {"share_generation", state.share.generation},
       {"share_controller", state.share.controller_id}});
  status_.worker_id = state.worker_id;
  worker_start_ = state.start_time;
  status_.own_generation = 0;
  status_.last_step = {};
  status_.last_decision = {};
  estimator_ = Estimator(options_.estimator);
  profile_known_ = false;
  handoff_seconds_ = 0;
  attempted_generation_ = 0;
  attempted_table_ = {};
  accepted_at_.reset();
  shadow_table_.reset();
}

void ControlLoop::Learn(const StepBatch& batch) {
  new_steps_ = false;
  for (const StepSample& sample : batch.steps) {
    roofline::StepLoad load;
    load.spilled_bytes = static_cast<double>(sample.spilled_bytes);
    load.host_bytes = static_cast<double>(sample.host_region_bytes);
    load.stream_bytes = static_cast<double>(sample.stream_region_bytes);
    load.dense_seconds = estimator_.DenseSeconds(sample.batch_size);
    load.ahead_fraction = estimator_.AheadFraction();
    load.device_attention_seconds = estimator_.ResidentSeconds(sample.resident_bytes);
    load.handoff_seconds = handoff_seconds_;
    // Before the step is learnt from: a prediction, not a fit.
    const double predicted =
        estimator_.num_used() == 0
            ? 0
            : roofline::PredictStep(load, estimator_.rates(), ObservedShare(sample));
    switch (estimator_.Add(sample)) {
      case Estimator::Verdict::kUsed:
        ++status_.steps_used;
        new_steps_ = true;
        status_.last_step = sample;
        status_.last_step_predicted_seconds = predicted;
        if (observer_ != nullptr) observer_->OnStep(sample, predicted);
        break;
      case Estimator::Verdict::kGarbage:
        ++status_.steps_garbage;
        break;
      case Estimator::Verdict::kNotDecode:
      case Estimator::Verdict::kNothingSpilled:
        ++status_.steps_ignored;
        break;
    }
  }
}

Role ControlLoop::RoleFor(const ShareState& share) {
  if (options_.shadow) return Role::kShadow;
  const bool leased = !share.controller_id.empty() && share.expires_in > absl::ZeroDuration();
  if (!leased) return Role::kActive;
  if (share.controller_id != options_.controller_id) return Role::kStandby;
  // A lease in this name from before this process is taken over. One that began while this process
  // was pushing belongs to a second process of the same name.
  const bool foreign = attempted_generation_ > 0 && share.generation > attempted_generation_;
  return foreign ? Role::kStandby : Role::kActive;
}

PolicyInput ControlLoop::MakeInput(const WorkerState& state) const {
  const StepSample& step = status_.last_step;
  PolicyInput input;
  input.spec.rates = estimator_.rates();
  input.spec.handoff_seconds = handoff_seconds_;
  const uint64_t requests = uint64_t{state.running_requests} + state.waiting_requests;
  const uint64_t batches = std::max<uint64_t>(2 * requests, step.batch_size);
  input.spec.batches = estimator_.BatchLoads(
      static_cast<uint32_t>(std::clamp<uint64_t>(batches, kMinBatchCovered, kMaxBatchCovered)),
      step.resident_bytes);
  input.spec.min_spilled_bytes = kMinSpilledBytes;
  input.spec.max_spilled_bytes =
      std::max({state.host_capacity_bytes, kGrowth * step.spilled_bytes, 2 * kMinSpilledBytes});
  input.batch_size = step.batch_size;
  input.spilled_bytes = step.spilled_bytes;
  input.allowed = state.share.allowed;
  input.num_steps_seen = estimator_.num_used();

  const absl::Duration renew_after = options_.lease / 3;
  if (options_.shadow) {
    input.in_force = shadow_table_;
    input.lease_due = shadow_table_.has_value() && clock_.Now() - shadow_at_ >= renew_after;
    return input;
  }
  const bool ours = state.share.controller_id == options_.controller_id &&
                    state.share.expires_in > absl::ZeroDuration();
  if (ours) {
    // What was pushed rather than what the worker made of it: a share that the worker had to clamp
    // must not look like a change.
    input.in_force =
        state.share.generation == attempted_generation_ ? attempted_table_ : state.share.table;
    // By the worker's clock too: a reply may have been lost.
    input.lease_due = !accepted_at_.has_value() || clock_.Now() - *accepted_at_ >= renew_after ||
                      state.share.expires_in <= options_.lease - renew_after;
  }
  return input;
}

void ControlLoop::DecideAndPush(const WorkerState& state) {
  if (status_.role == Role::kStandby) return;
  const PolicyInput input = MakeInput(state);
  const bool pin_missing = options_.policy.pin_share.has_value() && !input.in_force.has_value();
  const bool lost = status_.own_generation > 0 && !input.in_force.has_value() && !options_.shadow;
  if (!new_steps_ && !input.lease_due && !pin_missing && !lost) return;

  DecisionRecord record;
  record.time = clock_.Now();
  record.controller_id = options_.controller_id;
  record.worker_id = state.worker_id;
  record.shadow = options_.shadow;
  record.meet = state.meet;
  record.measured_step_seconds = status_.last_step.step_seconds;
  record.observed_share = ObservedShare(status_.last_step);
  record.input = input;
  record.decision = Decide(options_.policy, input);
  ++status_.decisions;
  if (record.decision.action != Action::kHold) {
    if (options_.shadow) {
      shadow_table_ = record.decision.table;
      shadow_at_ = clock_.Now();
    } else {
      Push(record.decision, state.share, record);
    }
  }
  status_.last_decision = record.decision;
  if (observer_ != nullptr) observer_->OnDecision(record);
  if (log_ == nullptr) return;
  if (absl::Status logged = log_->Append(record); !logged.ok()) {
    if (status_.log_errors++ == 0) {
      Log(LogLevel::kError, "decision not logged", {{"status", logged.ToString()}});
    }
  }
}

void ControlLoop::Push(const Decision& decision, const ShareState& share, DecisionRecord& record) {
  ShareUpdate update;
  update.controller_id = options_.controller_id;
  update.generation = share.generation + 1;
  update.table = decision.table;
  update.valid_for = options_.lease;
  update.reason = decision.reason;
  attempted_generation_ = update.generation;
  attempted_table_ = update.table;
  const absl::StatusOr<ShareReply> reply = client_.SetCpuShare(update);
  if (!reply.ok()) {
    ++status_.update_errors;
    record.outcome = "error";
    // It is tried again at each tick, and what refuses it once does so as a rule.
    if (reply.status() != logged_failure_ ||
        clock_.Now() - logged_failure_at_ >= kBetweenWarnings) {
      logged_failure_ = reply.status();
      logged_failure_at_ = clock_.Now();
      Log(LogLevel::kWarning, "share update failed",
          {{"generation", update.generation},
           {"status", reply.status().ToString()},
           {"failures", status_.update_errors}});
    }
    return;  // Whether it was taken shows in the worker's state at the next tick.
  }
  logged_failure_ = absl::OkStatus();
  record.outcome = OutcomeName(reply->outcome);
  record.generation = reply->in_force.generation;
  status_.generation = reply->in_force.generation;
  if (reply->outcome == ShareOutcome::kStale) {
    ++status_.updates_stale;
    status_.role = Role::kStandby;
    // Should the winner have this controller's name, its generation must not be taken for our own.
    attempted_generation_ = std::max<uint64_t>(reply->in_force.generation, 2) - 1;
    Log(LogLevel::kInfo, "share update is stale, standing by",
        {{"generation", update.generation},
         {"in_force", reply->in_force.generation},
         {"controller", reply->in_force.controller_id},
         {"expires_in", absl::FormatDuration(reply->in_force.expires_in)}});
    return;
  }
  ++(reply->outcome == ShareOutcome::kClamped ? status_.updates_clamped : status_.updates_applied);
  status_.own_generation = update.generation;
  accepted_at_ = clock_.Now();
  Log(decision.action == Action::kPush ? LogLevel::kInfo : LogLevel::kDebug, "share update",
      {{"outcome", record.outcome},
       {"generation", update.generation},
       {"share", decision.share},
       {"wanted", decision.wanted_share},
       {"spilled_bytes", record.input.spilled_bytes},
       {"batch_size", record.input.batch_size},
       {"reason", decision.reason}});
}

}  // namespace writescope::controller
