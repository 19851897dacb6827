// What is done to text before it is cut into words.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json_fwd.hpp"

namespace writescope::tokenizer {

// Where a stretch of text lies. A *piece* is the text between two added tokens; where it holds
// added tokens that are only looked for later, it is normalised in several stretches.
struct StretchContext {
  bool at_text_start = true;
  bool at_piece_start = true;
  bool at_piece_end = true;
};

// Thread-safe: never changes after it is made.
class Normalizer {
 public:
  virtual ~Normalizer() = default;
  // `text` is well-formed UTF-8, and so is the answer.
  virtual std::string Apply(std::string_view text, const StretchContext& context) const = 0;
};

// From the "normalizer" of tokenizer.json, null included: NFC, Prepend, Replace, Sequence. Another
// kind is Unimplemented and named.
absl::StatusOr<std::unique_ptr<const Normalizer>> MakeNormalizer(const nlohmann::json& spec);

}  // namespace writescope::tokenizer
