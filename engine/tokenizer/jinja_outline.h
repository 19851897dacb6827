// What a Jinja chat template can print, without running it: enough to tell a known template from
// one that only resembles it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/status/statusor.h"

namespace writescope::tokenizer {

struct JinjaOutline {
  // String literals that may be printed: those of {{ ... }} and {% set ... %}, but for subscripts
  // and arguments of raise_exception. Escapes are decoded.
  absl::btree_set<std::string> printed;
  // All tags without white space, literals in single quotes, ['role'] and ['content'] written as
  // .role and .content; each tag ends with a newline.
  std::string code;
  // Names of what is called, and of filters.
  absl::btree_set<std::string> calls;
  absl::btree_set<std::string> filters;
  // Text between tags that would be printed as it stands, after the trimming that chat templates
  // are rendered with (trim_blocks and lstrip_blocks).
  bool prints_raw_text = false;
};

// InvalidArgument, with the byte offset, for a tag or literal without an end.
absl::StatusOr<JinjaOutline> OutlineJinja(std::string_view text);

}  // namespace writescope::tokenizer
