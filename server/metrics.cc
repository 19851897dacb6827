#include "server/metrics.h"

#include <cmath>
#include <iterator>
#include <optional>
#include <string>

#include "absl/strings/ascii.h"
#include "server/cgroup_stats.h"
#include "server/vllm_metrics.h"

namespace writescope::server {
namespace {

const std::vector<double> kFirstTokenBuckets = {.001, .005, .01, .02, .04, .06, .08, .1,
                                                .25,  .5,   .75, 1,   2.5, 5,   7.5, 10,
                                                20,   40,   80,  160, 640, 2560};
const std::vector<double> kInterTokenBuckets = {.002, .004, .006, .008, .01, .015, .02, .025,
                                                .03,  .04,  .05,  .075, .1,  .15,  .2,  .3,
                                                .4,   .5,   .75,  1,    2.5, 5,    10};
const std::vector<double> kRequestBuckets = {.01, .05, .1,  .3,  .5,  .8,  1,    1.5,
                                             2,   2.5, 5,   10,  15,  20,  30,   40,
                                             50,  60,  120, 240, 480, 960, 1920, 7680};
const std::vector<double> kCancelBuckets = {.001, .005, .01, .025, .05, .1, .25,
                                            .5,   1,    2.5, 5,    10,  30, 60};
const std::vector<double> kErrorBuckets = {.01, .02, .05, .1, .2, .3, .5, 1, 2, 5};

constexpr std::array<const char*, 4> kRegionNames = {"device", "stream", "swing", "host"};
constexpr std::array<const char*, 4> kRejections = {"queue_full", "draining", "context_length",
                                                    "kv_capacity"};

}  // namespace

WorkerMetrics::WorkerMetrics(const MetricsInfo& info, const EngineSlot* slot)
    : slot_(slot), vllm_names_(info.vllm_names), registry_("writescope", {{"model", info.model}}) {
  MakeRequestMetrics();
  MakeCacheMetrics();
  MakeShareMetrics();
  MakeProcessMetrics(info);
}

void WorkerMetrics::MakeRequestMetrics() {
  for (const char* reason : {"max_tokens", "context_full", "eos_token", "stop_token", "stop_string",
                             "aborted", "time_limit"}) {
    registry_.Counter("requests_total", "Finished calls by method, finish reason and status code.",
                      {{"method", "Generate"}, {"finish_reason", reason}, {"code", "OK"}});
  }
  for (const char* code : {"CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "ALREADY_EXISTS",
                           "RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL", "DATA_LOSS"}) {
    registry_.Counter("requests_total", "",
                      {{"method", "Generate"}, {"finish_reason", "none"}, {"code", code}});
  }
  for (const char* reason : kRejections) {
    registry_.Counter("queue_rejections_total", "Requests refused at admission, by reason.",
                      {{"reason", reason}});
  }
  running_ = &registry_.Gauge("requests_running", "Requests that are being computed.");
  waiting_ = &registry_.Gauge("requests_waiting", "Requests in the queue.");
  prompt_tokens_ = &registry_.Counter(
      "prompt_tokens_total", "Prompt tokens read, those found in the prefix cache among them.");
  generation_tokens_ = &registry_.Counter("generation_tokens_total", "Tokens generated.");
  prefix_query_tokens_ = &registry_.Counter("prefix_query_tokens_total",
                                            "Prompt tokens looked up in the prefix cache.");
  const char* const cached_help = "Prompt tokens found in the prefix cache, by where they lay.";
  cached_gpu_tokens_ =
      &registry_.Counter("cached_prompt_tokens_total", cached_help, {{"tier", "gpu"}});
  cached_host_tokens_ =
      &registry_.Counter("cached_prompt_tokens_total", cached_help, {{"tier", "host"}});
  const char* const preemption_help = "Requests put back for want of room, by what was kept.";
  preemptions_pause_ =
      &registry_.Counter("preemptions_total", preemption_help, {{"kind", "pause"}});
  preemptions_drop_ = &registry_.Counter("preemptions_total", preemption_help, {{"kind", "drop"}});
  first_token_ = &registry_.Histogram("time_to_first_token_seconds",
                                      "From the request to its first token.", kFirstTokenBuckets);
  inter_token_ = &registry_.Histogram("inter_token_latency_seconds",
                                      "Between two tokens of a request.", kInterTokenBuckets);
  queue_time_ = &registry_.Histogram("queue_time_seconds", "Spent in the queue.", kRequestBuckets);
  prefill_time_ =
      &registry_.Histogram("prefill_time_seconds", "Reading the prompt.", kRequestBuckets);
  decode_time_ =
      &registry_.Histogram("decode_time_seconds", "Generating the answer.", kRequestBuckets);
  latency_ = &registry_.Histogram("request_latency_seconds", "From the request to its end.",
                                  kRequestBuckets);
  cancel_latency_ =
      &registry_.Histogram("cancel_latency_seconds",
                           "From a cancel until the request's memory was free.", kCancelBuckets);
}

void WorkerMetrics::MakeCacheMetrics() {
  for (size_t i = 0; i < regions_.size(); ++i) {
    const std::string region = kRegionNames[i];
    const char* const used_help =
        "KV bytes in use: of running requests, kept for later ones, or retained copies.";
    const char* const pinned_help =
        "Host KV memory that ought to be page-locked, by whether it is.";
    regions_[i].capacity =
        &registry_.Gauge("kv_capacity_bytes", "Size of the region.", {{"region", region}});
    regions_[i].active =
        &registry_.Gauge("kv_used_bytes", used_help, {{"region", region}, {"state", "active"}});
    regions_[i].cached =
        &registry_.Gauge("kv_used_bytes", used_help, {{"region", region}, {"state", "cached"}});
    regions_[i].retained =
        &registry_.Gauge("kv_used_bytes", used_help, {{"region", region}, {"state", "retained"}});
    regions_[i].pinned = regions_[i].pageable = nullptr;
    // The device region is no host memory, and the host region need not be page-locked.
    if (region != "stream" && region != "swing") continue;
    regions_[i].pinned =
        &registry_.Gauge("pinned_bytes", pinned_help, {{"region", region}, {"pinned", "true"}});
    regions_[i].pageable =
        &registry_.Gauge("pinned_bytes", pinned_help, {{"region", region}, {"pinned", "false"}});
  }
  moved_bytes_ = &registry_.Counter("kv_moved_bytes_total",
                                    "Bytes of sealed KV written a second time; stays 0 by design.");
  const char* const bytes_help = "KV bytes that crossed the link.";
  upload_bytes_ = &registry_.Counter("kv_transfer_bytes_total", bytes_help, {{"direction", "h2d"}});
  download_bytes_ =
      &registry_.Counter("kv_transfer_bytes_total", bytes_help, {{"direction", "d2h"}});
  upload_seconds_ = &registry_.Counter(
      "kv_transfer_seconds_total", "Time in which the link carried KV.", {{"direction", "h2d"}});
  integrity_failures_ = &registry_.Counter(
      "kv_integrity_failures_total",
      "Requests ended because a KV block was not what had been written.", {{"kind", "checksum"}});
}

void WorkerMetrics::MakeShareMetrics() {
  const char* const bytes_help = "KV bytes attended to, by processor.";
  const char* const seconds_help = "Busy with attention, by processor.";
  const char* const tokens_help =
      "Key positions attended to by finished requests, by processor; mean over layers.";
  cpu_bytes_ = &registry_.Counter("attention_bytes_total", bytes_help, {{"device", "cpu"}});
  gpu_bytes_ = &registry_.Counter("attention_bytes_total", bytes_help, {{"device", "gpu"}});
  cpu_seconds_ = &registry_.Counter("attention_seconds_total", seconds_help, {{"device", "cpu"}});
  gpu_seconds_ = &registry_.Counter("attention_seconds_total", seconds_help, {{"device", "gpu"}});
  cpu_tokens_ = &registry_.Counter("attention_tokens_total", tokens_help, {{"device", "cpu"}});
  gpu_tokens_ = &registry_.Counter("attention_tokens_total", tokens_help, {{"device", "gpu"}});
  share_observed_ = &registry_.Gauge(
      "cpu_share_ratio", "CPU's share of the spilled KV bytes in the last decode step.");
  share_target_ = &registry_.Gauge("cpu_share_target_ratio",
                                   "Share that the table in force asks of the last decode step.");
  share_min_ = &registry_.Gauge("cpu_share_min_ratio", "Least share that the placement allows.");
  share_max_ = &registry_.Gauge("cpu_share_max_ratio", "Largest share that the placement allows.");
  share_generation_ =
      &registry_.Gauge("cpu_share_generation", "Generation of the share table in force.");
  for (const char* result : {"applied", "clamped", "stale", "invalid", "expired"}) {
    registry_.Counter("share_updates_total", "Offered share tables by what became of them.",
                      {{"result", result}});
  }
  lease_seconds_ = &registry_.Gauge("controller_lease_seconds", "Left of the controller's lease.");
  controller_connected_ = &registry_.Gauge("controller_lease_active",
                                           "1 while a controller's table is in force, else 0.");
  controller_age_ = &registry_.Gauge("controller_last_update_age_seconds",
                                     "Since the last accepted table; 0 before the first.");
  spilled_bytes_ =
      &registry_.Gauge("step_spilled_bytes", "Spilled KV read by the last decode step.");
  predicted_step_ = &registry_.Gauge("model_predicted_step_seconds",
                                     "What the roofline expected of the last decode step.");
  model_error_ = &registry_.Histogram(
      "model_error_ratio", "Distance of a decode step from its prediction, over the prediction.",
      kErrorBuckets);
}

void WorkerMetrics::MakeProcessMetrics(const MetricsInfo& info) {
  const char* const step_help = "One forward pass of the batch.";
  decode_step_ =
      &registry_.Histogram("step_seconds", step_help, kInterTokenBuckets, {{"kind", "decode"}});
  prefill_step_ =
      &registry_.Histogram("step_seconds", step_help, kInterTokenBuckets, {{"kind", "prefill"}});
  steps_ = &registry_.Counter("steps_total", "Forward passes.");
  failed_steps_ = &registry_.Counter("failed_steps_total", "Forward passes that failed.");
  ping_pong_steps_ = &registry_.Counter("ping_pong_steps_total",
                                        "Decode steps of two micro-batches that took turns.");
  replayed_steps_ = &registry_.Counter(
      "replayed_steps_total", "Decode steps over resident KV that were launched as a graph.");
  step_graph_failures_ = &registry_.Counter(
      "step_graph_failures_total", "Graphs of decode steps that could not be made; none is, then.");
  nan_logits_ = &registry_.Counter("numeric_anomalies_total", "Logits that were not finite.",
                                   {{"kind", "nan_logits"}});
  repaired_text_ = &registry_.Counter(
      "repaired_text_total", "Outgoing texts that were not whole UTF-8 and had to be repaired.");
  dropped_telemetry_ = &registry_.Counter("telemetry_dropped_total",
                                          "Step messages lost because a watcher was slow.");
  cpu_periods_ = &registry_.Counter("cpu_periods_total",
                                    "Periods of the control group's CPU quota; 0 without a quota.");
  throttled_periods_ =
      &registry_.Counter("cpu_throttled_periods_total", "Those in which the quota paused threads.");
  cpu_quota_ =
      &registry_.Gauge("cpu_quota_cores", "CPU quota of the control group; 0 without one.");
  memory_used_ = &registry_.Gauge("cgroup_memory_used_bytes",
                                  "Memory of the control group, less page cache to be dropped.");
  memory_limit_ =
      &registry_.Gauge("cgroup_memory_limit_bytes", "Limit of the control group; 0 without one.");
  cpu_workers_ =
      &registry_.Gauge("worker_threads", "Threads of the CPU's attention, as many as attend now.");
  link_pace_ =
      &registry_.Gauge("link_pace_bytes_per_second", "Pace of the simulated link; 0 without one.");
  link_simulated_ = &registry_.Gauge("link_simulated", "1 when the link is simulated.");
  serving_ = &registry_.Gauge("serving", "1 when requests are taken.");
  healthy_ = &registry_.Gauge("engine_healthy", "1 when the engine runs and has not failed.");
  registry_
      .Gauge("build_info", "1, with the build in its labels.",
             {{"version", info.version}, {"compiler", __VERSION__}})
      .Set(1);
  registry_
      .Gauge("config_info", "1, with the configuration in its labels.",
             {{"device", info.device}, {"kv_dtype", info.kv_dtype}})
      .Set(1);
}

void WorkerMetrics::CountStep(const runtime::StepStats& stats) {
  if (stats.kind == runtime::StepKind::kPrefill) {
    prefill_step_->Observe(stats.step_seconds);
    return;
  }
  decode_step_->Observe(stats.step_seconds);
  if (stats.predicted_step_seconds > 0) {
    model_error_->Observe(std::abs(stats.step_seconds - stats.predicted_step_seconds) /
                          stats.predicted_step_seconds);
  }
}

void WorkerMetrics::CountRequestTimes(const runtime::RequestTimes& times) {
  queue_time_->Observe(times.queue_seconds);
  latency_->Observe(times.total_seconds);
  // Of a request that ended in the queue it is 0.
  if (times.prefill_seconds > 0) prefill_time_->Observe(times.prefill_seconds);
  if (times.first_token_seconds >= 0) {
    first_token_->Observe(times.first_token_seconds);
    decode_time_->Observe(times.decode_seconds);
  }
  if (times.cancel_seconds >= 0) cancel_latency_->Observe(times.cancel_seconds);
  if (runtime::ErrorReason(times.status) == "KV_INTEGRITY") integrity_failures_->Add();
}

void WorkerMetrics::CountCall(const std::string& method, const std::string& finish_reason,
                              const std::string& code) {
  registry_
      .Counter("requests_total", "",
               {{"method", method}, {"finish_reason", finish_reason}, {"code", code}})
      .Add();
}

void WorkerMetrics::CountRejection(std::string_view reason) {
  std::string label(reason);
  absl::AsciiStrToLower(&label);
  if (label == "context_length_exceeded") label = "context_length";
  if (label == "kv_capacity_exceeded") label = "kv_capacity";
  for (const char* known : kRejections) {
    if (label == known) registry_.Counter("queue_rejections_total", "", {{"reason", label}}).Add();
  }
}

void WorkerMetrics::CountPlacement(const runtime::PlacementReport& report) {
  cpu_tokens_->Add(static_cast<double>(report.cpu_tokens));
  gpu_tokens_->Add(static_cast<double>(report.gpu_resident_tokens + report.gpu_streamed_tokens));
}

void WorkerMetrics::CountShareUpdate(std::string_view result) {
  registry_.Counter("share_updates_total", "", {{"result", std::string(result)}}).Add();
}

void WorkerMetrics::CountDroppedTelemetry(uint64_t messages) {
  dropped_telemetry_->Add(static_cast<double>(messages));
}

std::vector<prometheus::MetricFamily> WorkerMetrics::Collect() const {
  serving_->Set(slot_->phase() == Phase::kServing ? 1 : 0);
  if (const runtime::Engine* engine = slot_->engine()) {
    Refresh(*engine);
  }
  RefreshCgroup();
  std::vector<prometheus::MetricFamily> families = registry_.Collect();
  if (vllm_names_) {
    std::vector<prometheus::MetricFamily> theirs = VllmMetrics(families);
    families.insert(families.end(), std::make_move_iterator(theirs.begin()),
                    std::make_move_iterator(theirs.end()));
  }
  return families;
}

void WorkerMetrics::RefreshCgroup() const {
  absl::MutexLock lock(&refresh_mutex_);
  const std::optional<CgroupStats> stats = ReadCgroupStats();
  if (!stats.has_value()) return;
  cpu_periods_->AdvanceTo(stats->cpu_periods_total);
  throttled_periods_->AdvanceTo(stats->cpu_throttled_periods_total);
  cpu_quota_->Set(stats->cpu_quota_cores);
  memory_used_->Set(stats->memory_used_bytes);
  memory_limit_->Set(stats->memory_limit_bytes);
}

void WorkerMetrics::Refresh(const runtime::Engine& engine) const {
  // Before the totals are read: of two scrapes at once the later would find them fallen.
  absl::MutexLock lock(&refresh_mutex_);
  const runtime::EngineState state = engine.state();
  const runtime::ShareState share = engine.share();
  running_->Set(state.running_requests);
  waiting_->Set(state.waiting_requests);
  prompt_tokens_->AdvanceTo(static_cast<double>(state.prompt_tokens_total));
  generation_tokens_->AdvanceTo(static_cast<double>(state.generated_tokens_total));
  prefix_query_tokens_->AdvanceTo(static_cast<double>(state.prefix_query_tokens_total));
  cached_gpu_tokens_->AdvanceTo(static_cast<double>(state.prefix_hit_tokens_device_total));
  cached_host_tokens_->AdvanceTo(static_cast<double>(state.prefix_hit_tokens_host_total));
  preemptions_pause_->AdvanceTo(static_cast<double>(state.preemptions_pause_total));
  preemptions_drop_->AdvanceTo(static_cast<double>(state.preemptions_drop_total));
  steps_->AdvanceTo(static_cast<double>(state.steps_total));
  failed_steps_->AdvanceTo(static_cast<double>(state.failed_steps_total));
  ping_pong_steps_->AdvanceTo(static_cast<double>(state.ping_pong_steps_total));
  replayed_steps_->AdvanceTo(static_cast<double>(state.replayed_steps_total));
  step_graph_failures_->AdvanceTo(static_cast<double>(state.step_graph_failures_total));
  nan_logits_->AdvanceTo(static_cast<double>(state.nan_logits_total));
  cpu_workers_->Set(state.cpu_workers);
  link_pace_->Set(state.link_pace_bytes_per_s);
  link_simulated_->Set(state.link_simulated ? 1 : 0);
  healthy_->Set(state.health.ok() ? 1 : 0);
  RefreshCache(state);
  RefreshShare(state, share);
}

void WorkerMetrics::RefreshCache(const runtime::EngineState& state) const {
  for (const runtime::RegionState& region : state.regions) {
    const RegionGauges& gauges = regions_[static_cast<size_t>(region.region)];
    const auto capacity = static_cast<double>(region.capacity_bytes);
    gauges.capacity->Set(capacity);
    gauges.active->Set(static_cast<double>(region.used_bytes));
    gauges.cached->Set(static_cast<double>(region.cached_bytes));
    gauges.retained->Set(static_cast<double>(region.retained_bytes));
    if (gauges.pinned == nullptr) continue;
    gauges.pinned->Set(region.page_locked ? capacity : 0);
    gauges.pageable->Set(region.page_locked ? 0 : capacity);
  }
  moved_bytes_->AdvanceTo(static_cast<double>(state.moved_bytes_total));
  upload_bytes_->AdvanceTo(static_cast<double>(state.upload_bytes_total));
  download_bytes_->AdvanceTo(static_cast<double>(state.download_bytes_total));
  upload_seconds_->AdvanceTo(state.link_busy_seconds_total);
}

void WorkerMetrics::RefreshShare(const runtime::EngineState& state,
                                 const runtime::ShareState& share) const {
  cpu_bytes_->AdvanceTo(static_cast<double>(state.cpu_attended_bytes_total));
  gpu_bytes_->AdvanceTo(static_cast<double>(state.device_attended_bytes_total));
  cpu_seconds_->AdvanceTo(state.cpu_busy_seconds_total);
  gpu_seconds_->AdvanceTo(state.device_attention_seconds_total);
  share_min_->Set(share.min_cpu_share);
  share_max_->Set(share.max_cpu_share);
  share_generation_->Set(static_cast<double>(share.generation));
  const bool has_lease = !share.controller_id.empty();
  controller_connected_->Set(has_lease ? 1 : 0);
  lease_seconds_->Set(has_lease ? absl::ToDoubleSeconds(share.expires_in) : 0);
  controller_age_->Set(absl::ToDoubleSeconds(share.since_update.value_or(absl::ZeroDuration())));
  if (had_lease_ && !has_lease) {
    registry_.Counter("share_updates_total", "", {{"result", "expired"}}).Add();
  }
  had_lease_ = has_lease;
  if (!state.last_decode_step.has_value()) return;
  share_observed_->Set(state.last_decode_step->observed_cpu_share);
  share_target_->Set(state.last_decode_step->planned_cpu_share);
  spilled_bytes_->Set(static_cast<double>(state.last_decode_step->spilled_bytes));
  predicted_step_->Set(state.last_decode_step->predicted_step_seconds);
}

}  // namespace writescope::server
