// GrpcWorkerClient: a worker over gRPC. The only file of the controller that knows gRPC.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "controller/worker_api.h"

namespace writescope::controller {

struct GrpcWorkerClientOptions {
  std::string address = "127.0.0.1:50052";  // host:port or unix:path
  // Of every call but the stream.
  absl::Duration call_deadline = absl::Seconds(2);
  // Between attempts to connect or to open the stream: doubles from the first to the last.
  absl::Duration min_backoff = absl::Milliseconds(100);
  absl::Duration max_backoff = absl::Seconds(5);
  // Without a connection for so long a warning is logged.
  absl::Duration warn_after = absl::Seconds(5);
  // And then again. What says the same of streams that end without a step is logged as seldom.
  absl::Duration between_warnings = absl::Minutes(1);
  // Pings on a silent stream, so that a worker whose machine is gone is noticed. Workers accept one
  // every 5 s.
  absl::Duration keepalive_interval = absl::Seconds(20);
  absl::Duration keepalive_timeout = absl::Seconds(10);
  // Steps that wait to be taken; the oldest are dropped and counted.
  size_t max_waiting_steps = 4096;
};

// A thread of its own reads the stream and connects again. The calls come from one other thread.
class GrpcWorkerClient final : public WorkerClient {
 public:
  explicit GrpcWorkerClient(const GrpcWorkerClientOptions& options);
  ~GrpcWorkerClient() override;

  StepBatch WatchSteps(absl::Duration timeout) override;
  absl::StatusOr<WorkerState> GetWorkerState() override;
  absl::StatusOr<roofline::MachineProfile> GetMachineProfile() override;
  absl::StatusOr<ShareReply> SetCpuShare(const ShareUpdate& update) override;

  // Ends a wait in WatchSteps and the stream, for good. Any thread.
  void Stop();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace writescope::controller
