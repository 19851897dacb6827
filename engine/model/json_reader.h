// Checked access to JSON that came from outside: config.json, index files, safetensors headers.
// A null value counts as absent. Every error names the file, the field and the value.
// Pure functions and values; any thread.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json_fwd.hpp"

namespace writescope::model {

// Parses one JSON value. `where` stands in front of every message. A key that occurs twice in one
// object is an error, since readers differ in which of the two they take.
absl::StatusOr<nlohmann::json> ParseJson(std::string_view text, const std::string& where);

// The value as a message shows it: scalars as written, cut at 60 characters; else its kind.
std::string DescribeJson(const nlohmann::json& value);

struct IntRange {
  int64_t min;
  int64_t max;
};

// A view of one JSON object; the json it was made from must outlive it. Each getter takes all
// spellings of one field: it is an error when two spellings are there and their values differ.
class JsonObject {
 public:
  using Names = std::initializer_list<const char*>;

  // An error when `value` is no object.
  static absl::StatusOr<JsonObject> Create(const nlohmann::json& value, const std::string& where);

  // Present and not null, under any of the names.
  bool Has(Names names) const;

  // An integer in `range`; 2048.0 counts as one, 2048.5 and "2048" do not.
  absl::StatusOr<int> Int(Names names, IntRange range) const;
  absl::StatusOr<int> IntOr(Names names, int fallback, IntRange range) const;
  absl::StatusOr<std::optional<int>> OptionalInt(Names names, IntRange range) const;
  // A finite number above zero.
  absl::StatusOr<double> PositiveDoubleOr(Names names, double fallback) const;
  // A finite number of zero or more.
  absl::StatusOr<double> NonNegativeDoubleOr(Names names, double fallback) const;
  absl::StatusOr<bool> BoolOr(Names names, bool fallback) const;
  absl::StatusOr<std::string> StringOr(Names names, const std::string& fallback) const;
  // A list, each item an integer in `range`; a lone integer is a list of one; absent is empty.
  absl::StatusOr<std::vector<int>> IntList(const char* name, IntRange range) const;
  absl::StatusOr<std::vector<std::string>> StringList(const char* name) const;
  // Nothing when absent.
  absl::StatusOr<std::optional<JsonObject>> Object(const char* name) const;

  // The name of a field that holds an object; empty if none does.
  std::string FieldWithObject() const;

  // "config.json: rope_scaling.factor", for a message about one field.
  std::string FieldPath(const char* name) const;

 private:
  JsonObject(const nlohmann::json* object, std::string prefix)
      : object_(object), prefix_(std::move(prefix)) {}

  const nlohmann::json* Find(const char* name) const;
  template <typename T, typename Read>
  absl::StatusOr<std::optional<T>> Agreed(Names names, Read read) const;
  absl::StatusOr<int> ReadInt(const char* name, const nlohmann::json& value, IntRange range) const;
  absl::StatusOr<double> DoubleOr(Names names, double fallback, bool zero_allowed) const;

  const nlohmann::json* object_;
  std::string prefix_;
};

}  // namespace writescope::model
