#include "server/wire.h"

#include "engine/runtime/error_reason.h"
#include "google/protobuf/empty.pb.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "grpcpp/support/proto_buffer_writer.h"

namespace writescope::server {

absl::Status ParseMessage(const grpc::ByteBuffer& bytes, google::protobuf::MessageLite* message) {
  grpc::ByteBuffer copy(bytes);  // Shares the bytes; the reader wants to own its buffer.
  {
    grpc::ProtoBufferReader reader(&copy);
    if (reader.status().ok() && message->ParseFromZeroCopyStream(&reader)) {
      return absl::OkStatus();
    }
  }
  // A message without fields takes every well-formed message, whatever is in its strings.
  grpc::ByteBuffer again(bytes);
  grpc::ProtoBufferReader reader(&again);
  google::protobuf::Empty anything;
  if (reader.status().ok() && anything.ParseFromZeroCopyStream(&reader)) {
    return runtime::WithReason(
        absl::InvalidArgumentError("a string field of the request is not valid UTF-8"),
        "INVALID_UTF8");
  }
  return runtime::WithReason(
      absl::InvalidArgumentError("the request is not a well-formed protobuf message"),
      "MALFORMED_MESSAGE");
}

bool SerializeMessage(const google::protobuf::MessageLite& message, grpc::ByteBuffer* bytes) {
  constexpr int kBlockBytes = 1 << 20;
  const size_t size = message.ByteSizeLong();
  if (size > static_cast<size_t>(INT32_MAX)) return false;
  bytes->Clear();
  grpc::ProtoBufferWriter writer(bytes, kBlockBytes, static_cast<int>(size));
  return message.SerializeToZeroCopyStream(&writer);
}

}  // namespace writescope::server
