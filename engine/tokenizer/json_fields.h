// Reading JSON files with checked types: every error names the file, the place and what was
// expected. Nothing here throws.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace writescope::tokenizer {

using Json = nlohmann::json;

// The errors of ReadRegularFile; InvalidArgument if it is not JSON.
absl::StatusOr<Json> ReadJsonFile(const std::string& path);
// The largest known tokenizer.json has 34 MB.
inline constexpr int64_t kMaxTokenizerFileBytes = int64_t{1} << 30;

// In all of these `where` says in errors which object is read. A field that is absent or null is
// an error without a default, else the default; a field of another type is an error always.
absl::StatusOr<const Json*> RequireObject(const Json& parent, const char* key,
                                          std::string_view where);
absl::StatusOr<const Json*> RequireArray(const Json& parent, const char* key,
                                         std::string_view where);
absl::StatusOr<std::string> RequireString(const Json& parent, const char* key,
                                          std::string_view where);
absl::StatusOr<int32_t> RequireInt32(const Json& parent, const char* key, std::string_view where);
absl::StatusOr<bool> BoolOr(const Json& parent, const char* key, bool fallback,
                            std::string_view where);
absl::StatusOr<std::string> StringOr(const Json& parent, const char* key, std::string fallback,
                                     std::string_view where);
// The field, or nullptr if it is absent or null.
const Json* FindField(const Json& parent, const char* key);

}  // namespace writescope::tokenizer
