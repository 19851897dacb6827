#include "controller/metrics.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace writescope::controller {
namespace {

std::string Name(const char* name) { return absl::StrCat("writescope_controller_", name); }

prometheus::Histogram& AddHistogram(prometheus::Registry& registry, const char* name,
                                    const char* help,
                                    const prometheus::Histogram::BucketBoundaries& buckets) {
  return prometheus::BuildHistogram()
      .Name(Name(name))
      .Help(help)
      .Register(registry)
      .Add({}, buckets);
}

// Label values from outside may hold any byte; the exposition format may not.
std::string Printable(const std::string& text) {
  std::string result;
  for (const char c : text.substr(0, 128)) result.push_back(c >= ' ' && c <= '~' ? c : '_');
  return result;
}

}  // namespace

Metrics::Metrics(prometheus::Registry& registry, const std::string& version,
                 const std::string& controller_id)
    : registry_(registry),
      dropped_observations_(AddCounter("metrics_dropped_observations_total",
                                       "Metric updates with NaN, infinity or a negative number.")),
      connected_(AddGauge("connected", "1 while a worker answers.")),
      generation_(AddGauge("generation", "Generation of the share table in force at the worker.")),
      own_generation_(AddGauge("own_generation",
                               "Generation of this controller's last accepted update; 0 if none.")),
      pushed_share_(
          AddGauge("cpu_share_ratio", "CPU share of the present step by the table in force.")),
      wanted_share_(AddGauge("wanted_cpu_share_ratio",
                             "CPU share of the present step that the roofline wants.")),
      observed_share_(
          AddGauge("observed_cpu_share_ratio", "CPU share that the last step really had.")),
      spilled_bytes_(AddGauge("spilled_bytes", "Spilled KV bytes that the last step read.")),
      batch_size_(AddGauge("batch_size", "Sequences in the last step.")),
      predicted_seconds_(
          AddGauge("predicted_step_seconds", "The roofline's prediction for the last step.")),
      predicted_lowest_seconds_(
          AddGauge("predicted_lowest_share_step_seconds",
                   "The roofline's prediction for the last step with the lowest share.")),
      measured_seconds_(AddGauge("measured_step_seconds", "Time that the last step took.")),
      dense_seconds_(
          AddGauge("dense_seconds", "Device time of a step in which the CPU has no query.")),
      model_error_(AddHistogram(registry, "model_error_ratio",
                                "|predicted - measured| / measured step time.",
                                {.01, .02, .03, .05, .075, .1, .15, .2, .3, .5, 1})),
      step_seconds_(AddHistogram(
          registry, "step_seconds", "Step time of decode with spilled KV.",
          {.001, .002, .005, .01, .02, .03, .05, .075, .1, .15, .2, .3, .5, .75, 1, 2.5, 5, 10})) {
  AddGauge("build_info", "1, with the version.",
           {{"version", Printable(version)}, {"controller_id", Printable(controller_id)}})
      .Set(1);
  for (const Role role : {Role::kNoWorker, Role::kStandby, Role::kShadow, Role::kActive}) {
    role_[role] = &AddGauge("role", "1 for what this controller is to the worker now.",
                            {{"role", RoleName(role)}});
  }
  AddRates();
  AddCounters();
}

void Metrics::AddRates() {
  const auto rate = [this](const char* side, const char* while_other) {
    return &AddGauge("rate_bytes_per_second",
                     "Measured KV bytes per second, with the other side idle or busy.",
                     {{"side", side}, {"other", while_other}});
  };
  rate_cpu_alone_ = rate("cpu", "idle");
  rate_cpu_with_link_ = rate("cpu", "busy");
  rate_link_alone_ = rate("link", "idle");
  rate_link_with_cpu_ = rate("link", "busy");
  rate_device_ = rate("device", "any");
}

void Metrics::AddCounters() {
  for (const char* outcome : {"applied", "clamped", "stale", "error"}) {
    updates_[outcome] =
        &AddCounter("updates_total", "Share updates sent, by outcome.", {{"outcome", outcome}});
  }
  for (const Action action : {Action::kHold, Action::kPush, Action::kRenew}) {
    decisions_[action] =
        &AddCounter("decisions_total", "Decisions made.", {{"action", ActionName(action)}});
  }
  const auto steps = [this](const char* result) {
    return &AddCounter("steps_total", "Steps received, by what became of them.",
                       {{"result", result}});
  };
  steps_used_ = steps("used");
  steps_ignored_ = steps("ignored");
  steps_garbage_ = steps("garbage");
  steps_dropped_ = steps("dropped");
  const auto changes = [this](const char* side) {
    return &AddCounter("rate_changes_total", "Times that a rate jumped rather than drifted.",
                       {{"side", side}});
  };
  cpu_changes_ = changes("cpu");
  link_changes_ = changes("link");
  connections_ = &AddCounter("connections_total", "Times that the step stream was opened.");
  worker_restarts_ = &AddCounter("worker_restarts_total", "Times that another worker answered.");
  log_errors_ = &AddCounter("decision_log_errors_total", "Decisions that could not be logged.");
}

prometheus::Gauge& Metrics::AddGauge(const char* name, const char* help,
                                     const prometheus::Labels& labels) {
  return prometheus::BuildGauge().Name(Name(name)).Help(help).Register(registry_).Add(labels);
}

prometheus::Counter& Metrics::AddCounter(const char* name, const char* help,
                                         const prometheus::Labels& labels) {
  return prometheus::BuildCounter().Name(Name(name)).Help(help).Register(registry_).Add(labels);
}

void Metrics::Set(prometheus::Gauge& gauge, double value) {
  if (!(value >= 0) || std::isinf(value)) return dropped_observations_.Increment();
  gauge.Set(value);
}

void Metrics::RaiseTo(prometheus::Counter& counter, uint64_t total) {
  const double rise = static_cast<double>(total) - counter.Value();
  if (rise > 0) counter.Increment(rise);
}

void Metrics::Observe(prometheus::Histogram& histogram, double value) {
  if (!(value >= 0) || std::isinf(value)) return dropped_observations_.Increment();
  histogram.Observe(value);
}

void Metrics::OnStep(const StepSample& sample, double predicted_seconds) {
  Set(measured_seconds_, sample.step_seconds);
  Set(observed_share_, sample.observed_cpu_share);
  Set(spilled_bytes_, static_cast<double>(sample.spilled_bytes));
  Set(batch_size_, sample.batch_size);
  Observe(step_seconds_, sample.step_seconds);
  if (predicted_seconds == 0) return;  // The first step of a worker has no prediction.
  Set(predicted_seconds_, predicted_seconds);
  Observe(model_error_, std::abs(predicted_seconds - sample.step_seconds) / sample.step_seconds);
}

void Metrics::OnDecision(const DecisionRecord& record) {
  decisions_.at(record.decision.action)->Increment();
  Set(pushed_share_, record.decision.share);
  Set(wanted_share_, record.decision.wanted_share);
  Set(predicted_lowest_seconds_, record.decision.predicted_lowest_seconds);
  const auto outcome = updates_.find(record.outcome);
  if (outcome != updates_.end()) outcome->second->Increment();
}

void Metrics::OnTick(const LoopStatus& status) {
  for (auto& [role, gauge] : role_) gauge->Set(role == status.role ? 1 : 0);
  connected_.Set(status.role == Role::kNoWorker ? 0 : 1);
  Set(generation_, static_cast<double>(status.generation));
  Set(own_generation_, static_cast<double>(status.own_generation));
  Set(dense_seconds_, status.dense_seconds);
  Set(*rate_cpu_alone_, status.rates.cpu_alone);
  Set(*rate_cpu_with_link_, status.rates.cpu_with_link);
  Set(*rate_link_alone_, status.rates.link_alone);
  Set(*rate_link_with_cpu_, status.rates.link_with_cpu);
  Set(*rate_device_, status.rates.device);
  RaiseTo(*steps_used_, status.steps_used);
  RaiseTo(*steps_ignored_, status.steps_ignored);
  RaiseTo(*steps_garbage_, status.steps_garbage);
  RaiseTo(*steps_dropped_, status.steps_dropped);
  RaiseTo(*cpu_changes_, status.cpu_changes);
  RaiseTo(*link_changes_, status.link_changes);
  RaiseTo(*connections_, status.connections);
  RaiseTo(*worker_restarts_, status.worker_restarts);
  RaiseTo(*log_errors_, status.log_errors);
}

}  // namespace writescope::controller
