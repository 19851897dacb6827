// The machine-readable reason of a failed request: an absl payload that the server turns into a
// google.rpc.ErrorInfo.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/cord.h"

namespace writescope::runtime {

inline constexpr char kErrorReasonUrl[] = "writescope/error-reason";

// Reasons in use: INVALID_PARAMETER, EMPTY_PROMPT, INVALID_UTF8, INVALID_TOKEN_ID, NO_TOKENIZER,
// CONTEXT_LENGTH_EXCEEDED, KV_CAPACITY_EXCEEDED, DUPLICATE_REQUEST_ID, QUEUE_FULL, DRAINING,
// ENGINE_FAILED, SLOW_CONSUMER, CANCELLED, DEADLINE_EXCEEDED, NUMERIC_FAILURE, STEP_FAILED,
// KV_INTEGRITY.
inline absl::Status WithReason(absl::Status status, std::string_view reason) {
  status.SetPayload(kErrorReasonUrl, absl::Cord(std::string(reason)));
  return status;
}

inline std::string ErrorReason(const absl::Status& status) {
  const auto payload = status.GetPayload(kErrorReasonUrl);
  return payload.has_value() ? std::string(*payload) : std::string();
}

}  // namespace writescope::runtime
