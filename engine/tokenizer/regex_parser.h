// Syntax of the regular expressions in tokenizer.json: the part of Oniguruma's syntax that
// tokenizers use, parsed to a tree. What is not understood is refused by name, never guessed.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer/char_set.h"

namespace writescope::tokenizer {

struct RegexNode {
  enum class Kind {
    kSet,        // One character of sets[set].
    kConcat,     // The children in order; no children: the empty text.
    kAlternate,  // The first child that leads to a match.
    kRepeat,     // Child 0, min to max times; max -1: no bound.
    kLookahead,  // One character of sets[set] follows; negated: none does.
    kLineStart,  // ^
    kLineEnd,    // $
    kTextStart,  // \A
    kTextEnd,    // \z
  };
  enum class Greed { kGreedy, kLazy, kPossessive };

  Kind kind = Kind::kConcat;
  int set = -1;
  bool negated = false;
  int min = 0;
  int max = -1;
  Greed greed = Greed::kGreedy;
  std::vector<std::unique_ptr<RegexNode>> children;
};

struct RegexTree {
  std::unique_ptr<RegexNode> root;
  std::vector<CharSet> sets;
};

// InvalidArgument for a malformed pattern, Unimplemented for syntax outside the subset; both name
// the construct and its byte offset.
absl::StatusOr<RegexTree> ParseRegex(std::string_view pattern);

}  // namespace writescope::tokenizer
