// Counts as the messages hold them, and the error of a field that the engine's types cannot hold:
// for the conversions between the two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/runtime/error_reason.h"

namespace writescope::server {

// What does not fit becomes the nearest number that does.
inline uint64_t ToUint64(int64_t value) {
  return static_cast<uint64_t>(std::max<int64_t>(value, 0));
}
inline uint32_t ToUint32(int64_t value) {
  return static_cast<uint32_t>(std::clamp<int64_t>(value, 0, std::numeric_limits<uint32_t>::max()));
}

// INVALID_ARGUMENT "FIELD: MESSAGE", with the field's path in the request as metadata.
inline absl::Status InvalidField(std::string_view field, std::string_view message,
                                 std::string_view reason = "INVALID_PARAMETER") {
  return runtime::WithMetadata(
      runtime::WithReason(
          absl::InvalidArgumentError(absl::StrCat(std::string(field), ": ", std::string(message))),
          reason),
      "field", field);
}

}  // namespace writescope::server
