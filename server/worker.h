// The worker process: servers, services, engine, drain and watchdog, wired together.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/config.h"
#include "server/control_service.h"
#include "server/engine_slot.h"
#include "server/generation_service.h"
#include "server/grpc_server.h"
#include "server/metrics.h"
#include "server/metrics_server.h"
#include "server/queued_stream.h"
#include "server/task_pool.h"

namespace writescope::server {

inline constexpr char kGenerationServiceName[] = "writescope.v1.GenerationService";
inline constexpr char kControlServiceName[] = "writescope.v1.WorkerControlService";

using EngineFactory = std::function<absl::StatusOr<std::unique_ptr<runtime::Engine>>(
    const runtime::EngineOptions&, runtime::EngineObserver*)>;

// One thread calls the methods, in the order below; Drain's question is asked on that thread too.
class Worker final : public runtime::EngineObserver {
 public:
  explicit Worker(WorkerConfig config);
  ~Worker() override;

  // Listens on all ports. From here on health checks are answered, and work is refused with
  // LOADING.
  absl::Status Listen();
  std::string generation_address() const { return generation_server_->address(); }
  std::string control_address() const { return control_server_->address(); }
  // Empty when metrics are not served.
  std::string metrics_address() const {
    return metrics_server_ == nullptr ? "" : metrics_server_->address();
  }

  // Makes the engine and, when it is ready, serves.
  absl::Status Load(const EngineFactory& make_engine);

  // To be called every second or so: after a longer pause the process was stopped as a whole (a
  // debugger, `docker pause`, a virtual machine that moved), and its silence until then is not the
  // engine's. OK: go on. INTERNAL: the engine has failed; Drain and exit.
  // DEADLINE_EXCEEDED: the engine is stuck for good; exit without a drain, which would get stuck
  // too.
  absl::Status CheckEngine(absl::Time now);

  // Refuses new work, waits for running requests, at most the drain timeout and only while
  // `keep_waiting()`, ends the rest, and closes the ports. The engine is gone afterwards.
  void Drain(const std::function<bool()>& keep_waiting);

  EngineSlot& slot() { return slot_; }
  // Generate calls that have not ended.
  int active_calls() const { return generation_->active_calls(); }
  const WorkerMetrics& metrics() const { return *metrics_; }

 private:
  void OnStep(const runtime::StepStats& stats) override;
  void OnInterTokenSeconds(double seconds) override;
  void OnRequestDone(const runtime::RequestTimes& times) override;
  void SetGenerationServing(bool serving);
  void SetFailed();

  const WorkerConfig config_;
  EngineSlot slot_;
  std::shared_ptr<WorkerMetrics> metrics_;
  StreamPump pump_;
  std::unique_ptr<GenerationServiceImpl> generation_;
  std::unique_ptr<ControlServiceImpl> control_;
  std::unique_ptr<runtime::Engine> engine_;
  TaskPool pool_;
  std::unique_ptr<GrpcServer> generation_server_;
  std::unique_ptr<GrpcServer> control_server_;
  std::unique_ptr<MetricsServer> metrics_server_;
  bool serving_ = false;
  absl::Time last_check_ = absl::InfinitePast();
  absl::Time running_since_ = absl::InfinitePast();  // The process, as far as CheckEngine saw.
  bool drained_ = false;
};

}  // namespace writescope::server
