// The tags of a Jinja template, and the text that is printed between them.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace writescope::tokenizer {

enum class JinjaPieceKind { kText, kPrint, kBlock };

struct JinjaPiece {
  JinjaPieceKind kind = JinjaPieceKind::kText;
  // Of a tag: names, numbers and operators as they stand, literals in single quotes with escapes.
  // Of text: itself, one such literal, never empty.
  std::vector<std::string> tokens;
  std::string source;
  size_t offset = 0;
};

// Comments are dropped. Text is trimmed as for chat templates, with trim_blocks and lstrip_blocks,
// where white space is ASCII's: text of other white space, which Jinja may trim too, is kept.
// InvalidArgument, with the byte offset, for a tag or literal without an end.
absl::StatusOr<std::vector<JinjaPiece>> LexJinja(std::string_view text);

// The text of a literal among the tokens; nothing for another token.
std::optional<std::string> JinjaLiteral(std::string_view token);
std::string JinjaLiteralToken(std::string_view text);

}  // namespace writescope::tokenizer
