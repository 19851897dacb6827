// The "pattern" field of tokenizer.json: literal text or a regular expression.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer/unicode_regex.h"
#include "nlohmann/json_fwd.hpp"

namespace writescope::tokenizer {

// Thread-safe: never changes after it is made.
class TextPattern {
 public:
  using Match = UnicodeRegex::Match;
  using Scratch = UnicodeRegex::Scratch;

  // `parent` holds {"pattern": {"String": ...}} or {"pattern": {"Regex": ...}}.
  static absl::StatusOr<TextPattern> FromJson(const nlohmann::json& parent, std::string_view where);
  static absl::StatusOr<TextPattern> FromRegex(std::string_view pattern);

  // Sets *matches to the non-overlapping matches from left to right.
  void FindAll(std::string_view text, Scratch* scratch, std::vector<Match>* matches) const;

  // The literal text, unless this is a regular expression.
  const std::optional<std::string>& literal() const { return literal_; }

 private:
  std::optional<std::string> literal_;
  std::optional<UnicodeRegex> regex_;
};

}  // namespace writescope::tokenizer
