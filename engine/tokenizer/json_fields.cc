#include "engine/tokenizer/json_fields.h"

#include <limits>

#include "absl/status/status.h"
#include "engine/base/regular_file.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/strings.h"

namespace writescope::tokenizer {
namespace {

absl::Status WrongType(const Json* field, const char* key, std::string_view expected,
                       std::string_view where) {
  return absl::InvalidArgumentError(Cat(where, ": field \"", key, "\" must be ", expected,
                                        ", it is ",
                                        field == nullptr ? "missing" : field->type_name()));
}

}  // namespace

absl::StatusOr<Json> ReadJsonFile(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadRegularFile(path, kMaxTokenizerFileBytes));
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(
        Cat(path, " (", text.size(), " bytes) is not JSON: ", error.what()));
  }
}

const Json* FindField(const Json& parent, const char* key) {
  if (!parent.is_object()) return nullptr;
  const auto it = parent.find(key);
  return it == parent.end() || it->is_null() ? nullptr : &*it;
}

absl::StatusOr<const Json*> RequireObject(const Json& parent, const char* key,
                                          std::string_view where) {
  const Json* field = FindField(parent, key);
  if (field == nullptr || !field->is_object()) return WrongType(field, key, "an object", where);
  return field;
}

absl::StatusOr<const Json*> RequireArray(const Json& parent, const char* key,
                                         std::string_view where) {
  const Json* field = FindField(parent, key);
  if (field == nullptr || !field->is_array()) return WrongType(field, key, "an array", where);
  return field;
}

absl::StatusOr<std::string> RequireString(const Json& parent, const char* key,
                                          std::string_view where) {
  const Json* field = FindField(parent, key);
  if (field == nullptr || !field->is_string()) return WrongType(field, key, "a string", where);
  return field->get_ref<const std::string&>();
}

absl::StatusOr<int32_t> RequireInt32(const Json& parent, const char* key, std::string_view where) {
  const Json* field = FindField(parent, key);
  if (field == nullptr || !field->is_number_integer()) {
    return WrongType(field, key, "an integer", where);
  }
  // An unsigned value above the signed range reads as negative here, and is refused with the rest.
  const auto value = field->get<int64_t>();
  if (value < 0 || value > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        Cat(where, ": field \"", key, "\" is ", field->dump(), ", out of range"));
  }
  return static_cast<int32_t>(value);
}

absl::StatusOr<bool> BoolOr(const Json& parent, const char* key, bool fallback,
                            std::string_view where) {
  const Json* field = FindField(parent, key);
  if (field == nullptr) return fallback;
  if (!field->is_boolean()) return WrongType(field, key, "true or false", where);
  return field->get<bool>();
}

absl::StatusOr<std::string> StringOr(const Json& parent, const char* key, std::string fallback,
                                     std::string_view where) {
  const Json* field = FindField(parent, key);
  if (field == nullptr) return fallback;
  if (!field->is_string()) return WrongType(field, key, "a string", where);
  return field->get_ref<const std::string&>();
}

}  // namespace writescope::tokenizer
