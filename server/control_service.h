// WorkerControlService over the engine: telemetry out, share tables in.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/engine_slot.h"
#include "server/metrics.h"
#include "server/queued_stream.h"
#include "writescope/v1/control.grpc.pb.h"

namespace writescope::server {

struct ControlServiceOptions {
  std::string worker_id;
  std::string version;
  // A watcher this many steps behind loses the oldest.
  size_t watch_buffer_steps = 1024;
  size_t max_watchers = 32;
};

// Thread-safe. What it is given outlives it.
class ControlServiceImpl final
    : public v1::WorkerControlService::WithRawCallbackMethod_WatchSteps<
          v1::WorkerControlService::WithRawCallbackMethod_SetCpuShare<
              v1::WorkerControlService::WithRawCallbackMethod_GetWorkerState<
                  v1::WorkerControlService::WithRawCallbackMethod_GetMachineProfile<
                      v1::WorkerControlService::WithRawCallbackMethod_SetLinkPace<
                          v1::WorkerControlService::Service>>>>> {
 public:
  ControlServiceImpl(const EngineSlot* slot, WorkerMetrics* metrics, StreamPump* pump,
                     const ControlServiceOptions& options)
      : slot_(slot), metrics_(metrics), pump_(pump), options_(options) {}

  // Engine thread: hands the step to every watcher and returns.
  void PublishStep(const runtime::StepStats& stats);
  // Ends all watchers' streams; new ones end at once.
  void CloseWatchers();

  grpc::ServerWriteReactor<grpc::ByteBuffer>* WatchSteps(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* SetCpuShare(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetWorkerState(grpc::CallbackServerContext* context,
                                           const grpc::ByteBuffer* request,
                                           grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetMachineProfile(grpc::CallbackServerContext* context,
                                              const grpc::ByteBuffer* request,
                                              grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* SetLinkPace(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;

 private:
  void FillState(const runtime::Engine* engine, v1::GetWorkerStateResponse* reply) const;

  // Whether the log lacks it: a controller tries again at each of its ticks, and is refused for the
  // same reason.
  bool IsNews(const absl::Status& refusal);

  const EngineSlot* const slot_;
  WorkerMetrics* const metrics_;
  StreamPump* const pump_;
  const ControlServiceOptions options_;
  const absl::Time start_time_ = absl::Now();

  absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::weak_ptr<QueuedStream>> watchers_ ABSL_GUARDED_BY(mutex_);
  absl::Status logged_refusal_ ABSL_GUARDED_BY(mutex_);
  absl::Time logged_refusal_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace writescope::server
