#include "server/worker.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "server/version.h"

namespace writescope::server {
namespace {

// Parsing and tokenising; the rest of the machine belongs to the engine.
constexpr int kPoolThreads = 2;
constexpr size_t kPoolQueue = 1024;
constexpr int kHardStallFactor = 5;
// CheckEngine, which is called every second or so, was not called for this long.
constexpr absl::Duration kStoppedAfter = absl::Seconds(5);
// For connections to close; no stream of a client is left by then.
constexpr absl::Duration kPortGrace = absl::Milliseconds(250);
constexpr absl::Duration kDrainPoll = absl::Milliseconds(50);

std::string DefaultWorkerId() {
  char host[256] = "worker";
  gethostname(host, sizeof(host) - 1);
  return absl::StrCat(host, "-", getpid());
}

std::string ModelName(const std::string& dir) {
  std::filesystem::path path(dir);
  if (!path.has_filename()) path = path.parent_path();
  return path.filename().string();
}

}  // namespace

Worker::Worker(WorkerConfig config) : config_(std::move(config)), pool_(kPoolThreads, kPoolQueue) {
  metrics_ = std::make_shared<WorkerMetrics>(
      MetricsInfo{.model = ModelName(config_.engine.model_dir),
                  .device = config_.engine.device == runtime::DeviceKind::kCuda ? "cuda" : "cpu",
                  .version = kVersion,
                  .kv_dtype = config_.engine.kv_dtype == KvDtype::kBf16 ? "bf16" : "f32",
                  .vllm_names = config_.vllm_metrics},
      &slot_);
  generation_ = std::make_unique<GenerationServiceImpl>(
      &slot_, metrics_.get(), &pool_, &pump_,
      GenerationServiceOptions{
          .max_request_bytes = static_cast<uint64_t>(config_.max_request_bytes),
          .stream = {.max_queued_bytes = static_cast<size_t>(config_.stream_buffer_bytes),
                     .max_stall = config_.stream_stall_limit},
          .version = kVersion});
  control_ = std::make_unique<ControlServiceImpl>(
      &slot_, metrics_.get(), &pump_,
      ControlServiceOptions{
          .worker_id = config_.worker_id.empty() ? DefaultWorkerId() : config_.worker_id,
          .version = kVersion});
}

Worker::~Worker() {
  Drain([] { return false; });
}

absl::Status Worker::Listen() {
  GrpcServerOptions options;
  options.listen = config_.listen;
  options.max_receive_bytes = config_.max_request_bytes;
  options.max_connection_age = config_.max_connection_age;
  options.max_connection_age_grace = config_.max_connection_age_grace;
  ASSIGN_OR_RETURN(generation_server_, GrpcServer::Create(options, {generation_.get()}));
  options.listen = config_.control_listen;
  ASSIGN_OR_RETURN(control_server_, GrpcServer::Create(options, {control_.get()}));
  if (!config_.metrics_listen.empty()) {
    ASSIGN_OR_RETURN(metrics_server_, MetricsServer::Create(config_.metrics_listen, metrics_));
  }
  // The control server answers for readiness too, so that a sidecar needs one address only.
  SetGenerationServing(false);
  control_server_->SetServing(kControlServiceName, true);
  return absl::OkStatus();
}

absl::Status Worker::Load(const EngineFactory& make_engine) {
  ASSIGN_OR_RETURN(engine_, make_engine(config_.engine, this));
  slot_.Set(engine_.get());
  slot_.SetPhase(Phase::kServing);
  SetGenerationServing(true);
  return absl::OkStatus();
}

void Worker::SetGenerationServing(bool serving) {
  serving_ = serving;
  generation_server_->SetServing(kGenerationServiceName, serving);
  control_server_->SetServing(kGenerationServiceName, serving);
}

absl::Status Worker::CheckEngine(absl::Time now) {
  if (now - last_check_ > kStoppedAfter) running_since_ = now;
  last_check_ = now;
  if (engine_ == nullptr) return absl::OkStatus();
  // An idle engine may sleep, so only silence during work counts. The heartbeat comes first: it
  // needs none of the engine's locks.
  const absl::Duration silence = now - std::max(engine_->last_heartbeat(), running_since_);
  const bool stalled = generation_->active_calls() > 0 && silence > config_.stall_limit;
  if (stalled) {
    if (serving_) {
      Log(LogLevel::kError, "the engine is silent while requests run",
          {{"seconds", absl::ToDoubleSeconds(silence)},
           {"limit_seconds", absl::ToDoubleSeconds(config_.stall_limit)}});
      SetGenerationServing(false);
    }
    if (silence > kHardStallFactor * config_.stall_limit) {
      SetFailed();
      return absl::DeadlineExceededError(absl::StrCat("the engine has been silent for ",
                                                      absl::FormatDuration(silence),
                                                      " with requests running"));
    }
    return absl::OkStatus();
  }
  const absl::Status health = engine_->state().health;
  if (!health.ok()) {
    SetFailed();
    return absl::InternalError(absl::StrCat("the engine has failed: ", health.ToString()));
  }
  if (!serving_ && slot_.phase() == Phase::kServing) {
    Log(LogLevel::kWarning, "the engine goes on", {});
    SetGenerationServing(true);
  }
  return absl::OkStatus();
}

void Worker::SetFailed() {
  slot_.SetPhase(Phase::kFailed);
  SetGenerationServing(false);
}

void Worker::Drain(const std::function<bool()>& keep_waiting) {
  if (std::exchange(drained_, true)) return;
  if (generation_server_ == nullptr || control_server_ == nullptr) return;
  const bool failed = slot_.phase() == Phase::kFailed;
  if (!failed) slot_.SetPhase(Phase::kDraining);
  // First phase: still listening, so that probes and refusals have an answer.
  SetGenerationServing(false);
  if (engine_ != nullptr) {
    engine_->StartDrain();
    Log(LogLevel::kInfo, "draining",
        {{"calls", generation_->active_calls()},
         {"timeout_seconds", absl::ToDoubleSeconds(config_.drain_timeout)}});
    const absl::Time end = Clock::Real().Now() + config_.drain_timeout;
    while (!failed && Clock::Real().Now() < end && keep_waiting()) {
      if (engine_->AwaitIdle(kDrainPoll)) break;
    }
    engine_->Stop();  // What is left ends UNAVAILABLE.
  }
  // Clients read the end of their streams.
  const absl::Time end = Clock::Real().Now() + config_.shutdown_grace;
  while (generation_->active_calls() > 0 && Clock::Real().Now() < end)
    absl::SleepFor(absl::Milliseconds(10));
  // Second phase: the ports close.
  control_->CloseWatchers();
  generation_server_->Shutdown(kPortGrace);
  control_server_->Shutdown(kPortGrace);
  metrics_server_.reset();
  pool_.Stop();
  slot_.Set(nullptr);
  engine_.reset();
  Log(LogLevel::kInfo, "drained", {});
}

void Worker::OnStep(const runtime::StepStats& stats) {
  metrics_->CountStep(stats);
  control_->PublishStep(stats);
}

void Worker::OnInterTokenSeconds(double seconds) { metrics_->ObserveInterToken(seconds); }

void Worker::OnRequestDone(const runtime::RequestTimes& times) {
  metrics_->CountRequestTimes(times);
}

}  // namespace writescope::server
