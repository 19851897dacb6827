// GenerationService over the engine: requests in, events out, a client that leaves cancels.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "server/engine_slot.h"
#include "server/metrics.h"
#include "server/queued_stream.h"
#include "server/task_pool.h"
#include "writescope/v1/generation.grpc.pb.h"

namespace writescope::server {

struct GenerationServiceOptions {
  uint64_t max_request_bytes = uint64_t{64} << 20;
  StreamLimits stream;
  std::string version;
};

// Thread-safe. What it is given outlives it; the engine's sinks may outlive it.
class GenerationServiceImpl final
    : public v1::GenerationService::WithRawCallbackMethod_Generate<
          v1::GenerationService::WithRawCallbackMethod_Tokenize<
              v1::GenerationService::WithRawCallbackMethod_Detokenize<
                  v1::GenerationService::WithRawCallbackMethod_GetModelInfo<
                      v1::GenerationService::WithRawCallbackMethod_Abort<
                          v1::GenerationService::Service>>>>> {
 public:
  GenerationServiceImpl(const EngineSlot* slot, WorkerMetrics* metrics, TaskPool* pool,
                        StreamPump* pump, const GenerationServiceOptions& options)
      : slot_(slot), metrics_(metrics), pool_(pool), pump_(pump), options_(options) {}

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override;

  // Generate calls that have not ended both here and in the engine.
  int active_calls() const { return active_calls_->load(); }

 private:
  const EngineSlot* const slot_;
  WorkerMetrics* const metrics_;
  TaskPool* const pool_;
  StreamPump* const pump_;
  const GenerationServiceOptions options_;
  // Shared with the calls, which may end after the service.
  const std::shared_ptr<std::atomic<int>> active_calls_ = std::make_shared<std::atomic<int>>(0);
};

}  // namespace writescope::server
