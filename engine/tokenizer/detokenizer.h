// Token ids to text as they are generated, one id at a time.
#pragma once

#include <string>

#include "engine/tokenizer/tokenizer.h"
#include "engine/tokenizer/utf8.h"

namespace writescope::tokenizer {

// One per request, for one thread. The tokenizer outlives it. The texts of all Push calls and of
// Finish, joined, are what Tokenizer::Decode says of the same ids.
class IncrementalDetokenizer {
 public:
  // `at_text_start`: whether the ids begin a text. False where they go on with one, as an answer
  // does with its prompt; then a leading space is text, and is kept.
  IncrementalDetokenizer(const Tokenizer& tokenizer, bool skip_special, bool at_text_start = true);

  // The text that this token completes: whole characters, possibly none. Bytes that can no longer
  // become a character come out as U+FFFD.
  std::string Push(TokenId id);

  // No more tokens will come: what was held back, as U+FFFD.
  std::string Finish();

 private:
  const Tokenizer& tokenizer_;
  const bool skip_special_;
  int strip_left_;  // Characters that may still be stripped at the start.
  Utf8Repairer repairer_;
};

}  // namespace writescope::tokenizer
