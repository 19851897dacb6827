#include "engine/tokenizer/detokenizer.h"

#include <string_view>

namespace writescope::tokenizer {

IncrementalDetokenizer::IncrementalDetokenizer(const Tokenizer& tokenizer, bool skip_special,
                                               bool at_text_start)
    : tokenizer_(tokenizer),
      skip_special_(skip_special),
      strip_left_(at_text_start ? tokenizer.leading_strip_count() : 0) {}

std::string IncrementalDetokenizer::Push(TokenId id) {
  if (skip_special_ && tokenizer_.IsSpecial(id)) return std::string();
  std::string_view bytes = tokenizer_.TokenBytes(id);
  while (strip_left_ > 0 && !bytes.empty()) {
    if (bytes.front() == tokenizer_.leading_strip()) {
      bytes.remove_prefix(1);
      --strip_left_;
    } else {
      strip_left_ = 0;
    }
  }
  std::string text;
  repairer_.Feed(bytes, &text);
  return text;
}

std::string IncrementalDetokenizer::Finish() {
  std::string text;
  repairer_.Finish(&text);
  return text;
}

}  // namespace writescope::tokenizer
