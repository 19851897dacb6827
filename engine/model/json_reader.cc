#include "engine/model/json_reader.h"

#include <cmath>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "nlohmann/json.hpp"

namespace writescope::model {
namespace {

absl::Status BadField(const std::string& path, const nlohmann::json& value,
                      const std::string& wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat(path, " is ", DescribeJson(value), "; it must be ", wanted));
}

}  // namespace

absl::StatusOr<nlohmann::json> ParseJson(std::string_view text, const std::string& where) {
  using Event = nlohmann::json::parse_event_t;
  std::vector<absl::flat_hash_set<std::string>> open_objects;
  std::optional<std::string> duplicate;
  const auto note_keys = [&](int /*depth*/, Event event, nlohmann::json& parsed) {
    if (event == Event::object_start) {
      open_objects.emplace_back();
    } else if (event == Event::object_end) {
      open_objects.pop_back();
    } else if (event == Event::key) {
      const std::string& key = parsed.get_ref<const std::string&>();
      if (!open_objects.back().insert(key).second && !duplicate) duplicate = key;
    }
    return true;
  };
  try {
    nlohmann::json value = nlohmann::json::parse(text.begin(), text.end(), note_keys);
    if (duplicate) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": the key \"", *duplicate, "\" occurs twice in one object"));
    }
    return value;
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(where, " is not valid JSON: ", error.what()));
  }
}

std::string DescribeJson(const nlohmann::json& value) {
  // A nested value is not printed: dump() recurses, and the nesting is the file's choice.
  if (value.is_array()) return "an array";
  if (value.is_object()) return "an object";
  constexpr size_t kShownChars = 60;
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true);
  if (text.size() > kShownChars) text = text.substr(0, kShownChars) + "...";
  return text;
}

absl::StatusOr<JsonObject> JsonObject::Create(const nlohmann::json& value,
                                              const std::string& where) {
  if (!value.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, " is ", DescribeJson(value), "; it must be an object"));
  }
  return JsonObject(&value, absl::StrCat(where, ": "));
}

const nlohmann::json* JsonObject::Find(const char* name) const {
  const auto it = object_->find(name);
  return it == object_->end() || it->is_null() ? nullptr : &*it;
}

bool JsonObject::Has(Names names) const {
  for (const char* name : names) {
    if (Find(name) != nullptr) return true;
  }
  return false;
}

std::string JsonObject::FieldWithObject() const {
  for (const auto& [name, value] : object_->items()) {
    if (value.is_object()) return name;
  }
  return "";
}

std::string JsonObject::FieldPath(const char* name) const { return absl::StrCat(prefix_, name); }

template <typename T, typename Read>
absl::StatusOr<std::optional<T>> JsonObject::Agreed(Names names, Read read) const {
  std::optional<T> found;
  const char* found_name = nullptr;
  for (const char* name : names) {
    const nlohmann::json* value = Find(name);
    if (value == nullptr) continue;
    ASSIGN_OR_RETURN(const T parsed, read(name, *value));
    if (found && *found != parsed) {
      return absl::InvalidArgumentError(absl::StrCat(
          FieldPath(found_name), " is ", DescribeJson(*Find(found_name)), " but ", name, " is ",
          DescribeJson(*value), "; they are two spellings of one field"));
    }
    found = parsed;
    found_name = name;
  }
  return found;
}

absl::StatusOr<int> JsonObject::ReadInt(const char* name, const nlohmann::json& value,
                                        IntRange range) const {
  const std::string wanted = absl::StrCat("an integer in [", range.min, ", ", range.max, "]");
  double number = 0;
  if (value.is_number_unsigned()) {
    number = static_cast<double>(value.get<uint64_t>());
  } else if (value.is_number_integer()) {
    number = static_cast<double>(value.get<int64_t>());
  } else if (value.is_number_float()) {
    number = value.get<double>();
  } else {
    return BadField(FieldPath(name), value, wanted);
  }
  // A double is exact far beyond the ranges in use, so rounding cannot hide a wrong value.
  if (number != std::floor(number) || number < static_cast<double>(range.min) ||
      number > static_cast<double>(range.max)) {
    return BadField(FieldPath(name), value, wanted);
  }
  return static_cast<int>(number);
}

absl::StatusOr<std::optional<int>> JsonObject::OptionalInt(Names names, IntRange range) const {
  return Agreed<int>(names, [&](const char* name, const nlohmann::json& value) {
    return ReadInt(name, value, range);
  });
}

absl::StatusOr<int> JsonObject::Int(Names names, IntRange range) const {
  ASSIGN_OR_RETURN(const std::optional<int> value, OptionalInt(names, range));
  if (value) return *value;
  return absl::InvalidArgumentError(absl::StrCat(FieldPath(*names.begin()),
                                                 " is absent or null; an integer in [", range.min,
                                                 ", ", range.max, "] is needed"));
}

absl::StatusOr<int> JsonObject::IntOr(Names names, int fallback, IntRange range) const {
  ASSIGN_OR_RETURN(const std::optional<int> value, OptionalInt(names, range));
  return value.value_or(fallback);
}

absl::StatusOr<double> JsonObject::DoubleOr(Names names, double fallback, bool zero_allowed) const {
  const auto read = [&](const char* name, const nlohmann::json& value) -> absl::StatusOr<double> {
    const double number = value.is_number() ? value.get<double>() : -1;
    if (!std::isfinite(number) || number < 0 || (number == 0 && !zero_allowed)) {
      return BadField(FieldPath(name), value,
                      zero_allowed ? "a number of 0 or more" : "a number above 0");
    }
    return number;
  };
  ASSIGN_OR_RETURN(const std::optional<double> value, Agreed<double>(names, read));
  return value.value_or(fallback);
}

absl::StatusOr<double> JsonObject::PositiveDoubleOr(Names names, double fallback) const {
  return DoubleOr(names, fallback, /*zero_allowed=*/false);
}

absl::StatusOr<double> JsonObject::NonNegativeDoubleOr(Names names, double fallback) const {
  return DoubleOr(names, fallback, /*zero_allowed=*/true);
}

absl::StatusOr<bool> JsonObject::BoolOr(Names names, bool fallback) const {
  const auto read = [&](const char* name, const nlohmann::json& value) -> absl::StatusOr<bool> {
    if (!value.is_boolean()) return BadField(FieldPath(name), value, "true or false");
    return value.get<bool>();
  };
  ASSIGN_OR_RETURN(const std::optional<bool> value, Agreed<bool>(names, read));
  return value.value_or(fallback);
}

absl::StatusOr<std::string> JsonObject::StringOr(Names names, const std::string& fallback) const {
  const auto read = [&](const char* name,
                        const nlohmann::json& value) -> absl::StatusOr<std::string> {
    if (!value.is_string()) return BadField(FieldPath(name), value, "a string");
    return value.get<std::string>();
  };
  ASSIGN_OR_RETURN(const std::optional<std::string> value, Agreed<std::string>(names, read));
  return value.value_or(fallback);
}

absl::StatusOr<std::vector<int>> JsonObject::IntList(const char* name, IntRange range) const {
  std::vector<int> list;
  const nlohmann::json* value = Find(name);
  if (value == nullptr) return list;
  if (!value->is_array()) {
    ASSIGN_OR_RETURN(const int item, ReadInt(name, *value, range));
    list.push_back(item);
    return list;
  }
  for (const nlohmann::json& entry : *value) {
    ASSIGN_OR_RETURN(const int item, ReadInt(name, entry, range));
    list.push_back(item);
  }
  return list;
}

absl::StatusOr<std::vector<std::string>> JsonObject::StringList(const char* name) const {
  std::vector<std::string> list;
  const nlohmann::json* value = Find(name);
  if (value == nullptr) return list;
  if (!value->is_array()) return BadField(FieldPath(name), *value, "a list of strings");
  for (const nlohmann::json& entry : *value) {
    if (!entry.is_string()) return BadField(FieldPath(name), entry, "a list of strings");
    list.push_back(entry.get<std::string>());
  }
  return list;
}

absl::StatusOr<std::optional<JsonObject>> JsonObject::Object(const char* name) const {
  const nlohmann::json* value = Find(name);
  if (value == nullptr) return std::optional<JsonObject>();
  if (!value->is_object()) return BadField(FieldPath(name), *value, "an object");
  return std::optional<JsonObject>(JsonObject(value, absl::StrCat(FieldPath(name), ".")));
}

}  // namespace writescope::model
