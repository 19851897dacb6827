#include "engine/tokenizer/text_pattern.h"

#include <utility>

#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/json_fields.h"
#include "engine/tokenizer/strings.h"

namespace writescope::tokenizer {

absl::StatusOr<TextPattern> TextPattern::FromRegex(std::string_view pattern) {
  ASSIGN_OR_RETURN(UnicodeRegex regex, UnicodeRegex::Compile(pattern));
  TextPattern result;
  result.regex_ = std::move(regex);
  return result;
}

absl::StatusOr<TextPattern> TextPattern::FromJson(const nlohmann::json& parent,
                                                  std::string_view where) {
  ASSIGN_OR_RETURN(const Json* spec, RequireObject(parent, "pattern", where));
  if (FindField(*spec, "Regex") != nullptr) {
    ASSIGN_OR_RETURN(const std::string regex, RequireString(*spec, "Regex", where));
    absl::StatusOr<TextPattern> pattern = FromRegex(regex);
    if (pattern.ok()) return pattern;
    return absl::Status(pattern.status().code(), Cat(where, ": ", pattern.status().message()));
  }
  TextPattern result;
  ASSIGN_OR_RETURN(result.literal_, RequireString(*spec, "String", where));
  if (result.literal_->empty()) {
    return absl::InvalidArgumentError(Cat(where, ": the pattern is empty"));
  }
  return result;
}

void TextPattern::FindAll(std::string_view text, Scratch* scratch,
                          std::vector<Match>* matches) const {
  if (regex_.has_value()) {
    regex_->FindAll(text, scratch, matches);
    return;
  }
  matches->clear();
  for (size_t pos = text.find(*literal_); pos != std::string_view::npos;
       pos = text.find(*literal_, pos + literal_->size())) {
    matches->push_back({pos, pos + literal_->size()});
  }
}

}  // namespace writescope::tokenizer
