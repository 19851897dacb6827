// Messages and their bytes. The services take requests as bytes, since gRPC answers a message that
// protobuf refuses (invalid UTF-8, say) with UNIMPLEMENTED; here it is INVALID_ARGUMENT.
#pragma once

#include "absl/status/status.h"
#include "google/protobuf/message_lite.h"
#include "grpcpp/support/byte_buffer.h"

namespace writescope::server {

// INVALID_ARGUMENT with reason INVALID_UTF8 or MALFORMED_MESSAGE.
absl::Status ParseMessage(const grpc::ByteBuffer& bytes, google::protobuf::MessageLite* message);

// False above 2 GiB, the most that protobuf writes.
bool SerializeMessage(const google::protobuf::MessageLite& message, grpc::ByteBuffer* bytes);

}  // namespace writescope::server
