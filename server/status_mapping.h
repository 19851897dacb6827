// The one place where an absl::Status becomes a gRPC status, and back into words.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "engine/runtime/error_reason.h"
#include "grpcpp/support/status.h"

namespace writescope::server {

inline constexpr char kErrorDomain[] = "writescope";
using runtime::WithMetadata;

// Same code and message. Details: a google.rpc.Status with an ErrorInfo of the reason (of
// runtime::ErrorReason, else the code's name) and of the metadata, a BadRequest where there is a
// "field", a RetryInfo for QUEUE_FULL. Text is repaired and cut to what a trailer holds.
grpc::Status ToGrpcStatus(const absl::Status& status);

// What a client reads out of a failed call.
struct ErrorDescription {
  std::string code_name;
  std::string reason;  // Empty when the error carries no details of ours.
  std::string message;
  std::map<std::string, std::string> metadata;
};
ErrorDescription DescribeError(const grpc::Status& status);

// "INVALID_ARGUMENT" and so on.
std::string CodeName(grpc::StatusCode code);

}  // namespace writescope::server
