// Unary methods that take and give bytes (see wire.h).
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "engine/runtime/error_reason.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/status_mapping.h"
#include "server/task_pool.h"
#include "server/wire.h"

namespace writescope::server {

// Parses, has `handle(const Request&, Response*)` answer with an absl::Status, and finishes the
// call; on `pool` when there is one, else at once.
template <typename Request, typename Response, typename Handler>
grpc::ServerUnaryReactor* AnswerUnary(grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* request, grpc::ByteBuffer* response,
                                      TaskPool* pool, Handler handle) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  // `request` and `response` live until Finish.
  auto answer = [reactor, request, response, handle = std::move(handle)] {
    Request message;
    Response reply;
    absl::Status status = ParseMessage(*request, &message);
    if (status.ok()) status = handle(message, &reply);
    if (status.ok() && !SerializeMessage(reply, response)) {
      status = absl::InternalError("the answer cannot be serialised");
    }
    reactor->Finish(ToGrpcStatus(status));
  };
  if (pool == nullptr) {
    answer();
  } else if (!pool->Run(request->Length(), answer)) {
    reactor->Finish(ToGrpcStatus(runtime::WithReason(
        absl::ResourceExhaustedError("too many requests wait to be read"), "QUEUE_FULL")));
  }
  return reactor;
}

}  // namespace writescope::server
