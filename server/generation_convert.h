// The messages of generation.proto to and from the engine's own types.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/runtime/engine.h"
#include "engine/runtime/request.h"
#include "writescope/v1/generation.pb.h"

namespace writescope::server {

inline constexpr size_t kMaxRequestIdBytes = 256;

// Checks what the engine's types cannot hold: an unset prompt, numbers beyond their range. What the
// numbers mean is the engine's to check.
absl::StatusOr<runtime::GenerateRequest> FromProto(const v1::GenerateRequest& proto);

std::vector<runtime::PromptSegment> FromProto(const v1::SegmentedPrompt& proto);
// INVALID_ARGUMENT, reason INVALID_TOKEN_ID, beyond 2^31.
absl::StatusOr<std::vector<TokenId>> ToTokenIds(
    const google::protobuf::RepeatedField<uint32_t>& ids, std::string_view field);

// One or, with many prompt logprobs, several messages in order. Text that is not whole UTF-8 is
// repaired, and `*repaired` set.
std::vector<std::unique_ptr<v1::GenerateResponse>> ToProto(const std::string& request_id,
                                                           runtime::GenerateEvent event,
                                                           bool* repaired);

v1::GetModelInfoResponse ToProto(const runtime::ModelInfo& info, uint64_t max_request_bytes);

// "stop_token" and so on, for logs and metrics.
const char* FinishReasonName(runtime::FinishReason reason);

}  // namespace writescope::server
