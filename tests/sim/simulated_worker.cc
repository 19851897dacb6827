#include "tests/sim/simulated_worker.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace writescope::sim {
namespace {

using controller::ShareOutcome;
using controller::StepBatch;
using controller::StepSample;

constexpr size_t kHistory = 4096;
// Without requests a worker looks again after this.
constexpr absl::Duration kIdle = absl::Milliseconds(20);

}  // namespace

// What one controller sees. Steps from its own start on; a restart of the worker breaks the stream.
class SimulatedWorker::Connection final : public controller::WorkerClient {
 public:
  explicit Connection(SimulatedWorker& worker)
      : worker_(worker), process_(worker.process_), next_step_(worker.num_steps_ + 1) {}

  StepBatch WatchSteps(absl::Duration timeout) override {
    const absl::Duration wait = std::min(timeout, worker_.UntilNextStepEnds());
    worker_.clock_.Advance(std::max(wait, absl::Microseconds(1)));
    worker_.CatchUp();
    StepBatch batch;
    if (!worker_.reachable) {
      broken_ = true;
      batch.stream = stream_;
      return batch;
    }
    if (broken_ || process_ != worker_.process_) {
      broken_ = false;
      process_ = worker_.process_;
      next_step_ = worker_.num_steps_ + 1;
      ++stream_;
    }
    batch.stream = stream_;
    batch.connected = true;
    for (const StepSample& step : worker_.history_) {
      if (step.step >= next_step_) batch.steps.push_back(step);
    }
    next_step_ = worker_.num_steps_ + 1;
    return batch;
  }

  absl::StatusOr<controller::WorkerState> GetWorkerState() override {
    worker_.CatchUp();
    if (!worker_.reachable) return absl::UnavailableError("simulated outage");
    controller::WorkerState state;
    state.worker_id = absl::StrCat("simulated-", worker_.process_);
    state.model = "simulated";
    state.device = "simulated";
    state.phase = "serving";
    state.start_time = worker_.started_;
    state.running_requests = worker_.now().batch_size;
    state.host_capacity_bytes = uint64_t{120} << 30;
    state.steps_total = worker_.num_steps_;
    state.meet = worker_.options_.meet;
    state.share = worker_.share_;
    state.share.allowed = worker_.Allowed();
    state.share.expires_in =
        std::max(absl::ZeroDuration(), worker_.lease_ends_ - worker_.clock_.Now());
    return state;
  }

  absl::StatusOr<roofline::MachineProfile> GetMachineProfile() override {
    if (!worker_.reachable) return absl::UnavailableError("simulated outage");
    roofline::MachineProfile profile;
    profile.name = "simulated";
    const Machine& machine = worker_.machine;
    const double factor = worker_.options_.profile_factor;
    profile.rates = {machine.cpu_alone * factor, machine.cpu_with_link * factor,
                     machine.link_alone * factor, machine.link_with_cpu * factor,
                     machine.device * factor};
    profile.handoff_per_layer_seconds = machine.handoff_per_layer;
    profile.num_layers = machine.num_layers;
    return profile;
  }

  absl::StatusOr<controller::ShareReply> SetCpuShare(
      const controller::ShareUpdate& update) override {
    worker_.CatchUp();
    ++worker_.set_calls_;
    std::uniform_real_distribution<double> chance(0, 1);
    if (!worker_.reachable) return absl::UnavailableError("simulated outage");
    if (chance(worker_.rng_) < worker_.options_.lost_request_probability) {
      return absl::DeadlineExceededError("simulated loss of a request");
    }
    if (absl::Status status = update.table.Validate(); !status.ok()) return status;
    const controller::ShareReply reply = worker_.Offer(update);
    if (chance(worker_.rng_) < worker_.options_.lost_reply_probability) {
      return absl::DeadlineExceededError("simulated loss of a reply");
    }
    return reply;
  }

 private:
  SimulatedWorker& worker_;
  uint64_t process_;
  uint64_t next_step_;
  uint64_t stream_ = 1;
  bool broken_ = false;
};

SimulatedWorker::SimulatedWorker(FakeClock& clock, const Options& options)
    : workload([](absl::Duration) { return Workload(); }),
      clock_(clock),
      options_(options),
      rng_(options.seed),
      started_(clock.Now()),
      step_started_(clock.Now()) {}

std::unique_ptr<controller::WorkerClient> SimulatedWorker::Connect() {
  return std::make_unique<Connection>(*this);
}

void SimulatedWorker::Restart() {
  ++process_;
  started_ = clock_.Now();
  step_started_ = started_;
  step_running_ = false;
  num_steps_ = 0;
  history_.clear();
  share_ = {};
  lease_ends_ = absl::InfinitePast();
}

roofline::ShareInterval SimulatedWorker::Allowed() const {
  const Workload w = now();
  return {w.host_fraction, std::max(w.host_fraction, 1 - w.stream_fraction)};
}

double SimulatedWorker::share_in_force() const {
  const Workload w = now();
  const double share =
      share_.controller_id.empty()
          ? options_.start_up_share
          : share_.table.Lookup(w.batch_size, static_cast<uint64_t>(w.spilled_bytes));
  const roofline::ShareInterval allowed = Allowed();
  return std::clamp(share, allowed.min_share, allowed.max_share);
}

void SimulatedWorker::Expire() {
  if (share_.controller_id.empty() || clock_.Now() < lease_ends_) return;
  share_.controller_id.clear();
  share_.table = {};
}

double SimulatedWorker::Noise() {
  // Bounded, so that a machine never stands still.
  const double deviation = std::normal_distribution<double>(0, options_.rate_noise)(rng_);
  return std::exp(std::clamp(deviation, -0.7, 0.7));
}

StepSample SimulatedWorker::MakeStep() {
  Machine noisy = machine;
  if (options_.rate_noise > 0) {
    const double cpu = Noise();
    const double link = Noise();
    noisy.cpu_alone *= cpu;
    noisy.cpu_with_link *= cpu;
    noisy.link_alone *= link;
    noisy.link_with_cpu *= link;
    noisy.dense_per_layer *= Noise();
  }
  StepSample sample = RunStep(noisy, now(), share_in_force(), options_.meet);
  sample.planned_cpu_share = share_in_force();
  sample.share_generation = share_.generation;
  return sample;
}

StepSample SimulatedWorker::Garbage(StepSample sample) {
  const double odd[] = {std::numeric_limits<double>::quiet_NaN(),
                        std::numeric_limits<double>::infinity(),
                        -1.0,
                        0.0,
                        1e300,
                        -std::numeric_limits<double>::infinity()};
  double* fields[] = {&sample.step_seconds,       &sample.cpu_busy_seconds,
                      &sample.link_busy_seconds,  &sample.both_busy_seconds,
                      &sample.dense_seconds,      &sample.device_attention_seconds,
                      &sample.observed_cpu_share, &sample.planned_cpu_share};
  uint64_t* counts[] = {&sample.spilled_bytes,       &sample.cpu_bytes,
                        &sample.link_bytes,          &sample.resident_bytes,
                        &sample.cpu_bytes_both_busy, &sample.link_bytes_both_busy,
                        &sample.host_region_bytes,   &sample.stream_region_bytes};
  for (double* field : fields) {
    if (rng_() % 2 == 0) *field = odd[rng_() % std::size(odd)];
  }
  for (uint64_t* count : counts) {
    if (rng_() % 3 == 0) *count = rng_() >> (rng_() % 64);
  }
  if (rng_() % 4 == 0) sample.batch_size = static_cast<uint32_t>(rng_());
  return sample;
}

absl::Duration SimulatedWorker::UntilNextStepEnds() {
  CatchUp();
  if (!step_running_) return kIdle;
  return step_started_ + absl::Seconds(step_.step_seconds) - clock_.Now();
}

void SimulatedWorker::CatchUp() {
  Expire();
  while (true) {
    if (!step_running_) {
      if (!serving) {
        step_started_ = clock_.Now();
        return;
      }
      step_ = MakeStep();
      step_running_ = true;
    }
    const absl::Time end = step_started_ + absl::Seconds(step_.step_seconds);
    if (end > clock_.Now()) return;
    step_running_ = false;
    step_started_ = end;
    step_.step = ++num_steps_;
    last_step_ = step_;
    std::uniform_real_distribution<double> chance(0, 1);
    history_.push_back(chance(rng_) < options_.garbage_probability ? Garbage(step_) : step_);
    history_.back().step = num_steps_;
    if (history_.size() > kHistory) history_.pop_front();
    share_.last_cpu_share = last_step_.observed_cpu_share;
  }
}

controller::ShareReply SimulatedWorker::Offer(const controller::ShareUpdate& update) {
  Expire();
  controller::ShareReply reply;
  const bool foreign_lease =
      !share_.controller_id.empty() && share_.controller_id != update.controller_id;
  share_.allowed = Allowed();
  if (update.generation <= share_.generation || foreign_lease) {
    reply.outcome = ShareOutcome::kStale;
  } else {
    share_.generation = update.generation;
    share_.controller_id = update.controller_id;
    share_.table = update.table;
    lease_ends_ = clock_.Now() + update.valid_for;
    const int moved = roofline::ClampTable(share_.table, share_.allowed);
    reply.outcome = moved > 0 ? ShareOutcome::kClamped : ShareOutcome::kApplied;
    applied_.push_back({clock_.Now(), update.controller_id, update.generation, share_.table});
  }
  reply.in_force = share_;
  reply.in_force.expires_in = std::max(absl::ZeroDuration(), lease_ends_ - clock_.Now());
  return reply;
}

}  // namespace writescope::sim
