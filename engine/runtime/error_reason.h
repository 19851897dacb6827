// The machine-readable part of a failed request's error: absl payloads that the server turns into a
// google.rpc.ErrorInfo.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

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

// A payload under this prefix is one entry of metadata, named by what follows.
inline constexpr char kErrorMetadataPrefix[] = "writescope/error-metadata/";

// Names in use: `field` is the request's field by its path in the API; `value` is what was asked
// for and `limit` the bound that it passed; prompt_tokens, min_tokens, max_context_tokens,
// position.
inline absl::Status WithMetadata(absl::Status status, std::string_view name,
                                 std::string_view value) {
  status.SetPayload(absl::StrCat(kErrorMetadataPrefix, std::string(name)),
                    absl::Cord(std::string(value)));
  return status;
}
template <typename Number>
requires std::is_arithmetic_v<Number> absl::Status WithMetadata(absl::Status status,
                                                                std::string_view name,
                                                                Number value) {
  return WithMetadata(std::move(status), name, std::string_view(absl::StrCat(value)));
}

inline std::string ErrorReason(const absl::Status& status) {
  const auto payload = status.GetPayload(kErrorReasonUrl);
  return payload.has_value() ? std::string(*payload) : std::string();
}

}  // namespace writescope::runtime
