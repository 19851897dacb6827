// What of a Jinja chat template runs when a chat of plain messages is rendered, without running it:
// enough to tell a known template from one that only resembles it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace writescope::tokenizer {

struct JinjaStatement {
  // Tokens with one blank between them: "print ..." for {{ ... }}, "text ..." for text between tags
  // that is printed as it stands, else a tag's own words. Literals stand in single quotes with
  // escapes. Of what means the same there is one form: ['role'] is written . role, 'a' + 'b' where
  // strings are added up 'ab', and the message of raise_exception is left out.
  std::string code;
  // As the template has it, for messages.
  std::string source;
};

// The statements in order. Left out is what cannot run for messages that have a role and a content
// each, without tools: branches for tools, for a tool's answers, and for reasoning beside the
// content. Tags other than if, for and set are always listed, and dictionaries too, since their
// ends are not looked for. White space is trimmed as for chat templates (trim_blocks,
// lstrip_blocks). InvalidArgument, with the byte offset, for a tag, literal or block without an
// end.
absl::StatusOr<std::vector<JinjaStatement>> OutlineJinja(std::string_view text);

}  // namespace writescope::tokenizer
