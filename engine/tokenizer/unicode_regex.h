// Finds the matches of a regular expression in UTF-8 text, in time linear in the text whatever
// text and expression are.
//
// The order of choices is that of a backtracking matcher (first alternative, longest repeat, then
// back), so the matches are those that Oniguruma or PCRE2 find. What makes it linear: an expression
// without captures fails from (instruction, offset) or it does not, however it got there, so each
// failure of a loop is remembered and no loop is walked twice from the same place. That also holds
// from one match to the next. Nothing recurses; the stack of choices is on the heap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer/char_set.h"

namespace writescope::tokenizer {

// Thread-safe: never changes after Compile. Callers bring the scratch memory.
class UnicodeRegex {
 public:
  struct Match {
    size_t begin;
    size_t end;
  };
  struct Choice {
    enum class Kind : uint8_t { kResume, kMarkFailed, kMarkRangeFailed, kLoopBack };
    Kind kind;
    int pc;
    size_t pos;
    size_t min_pos;  // A loop gives characters back down to here.
  };
  struct Scratch {
    std::vector<uint64_t> failed;  // Bit [memo][offset].
    std::vector<Choice> choices;
  };

  // Errors as ParseRegex, and Unimplemented for an unbounded repeat of what may be empty.
  static absl::StatusOr<UnicodeRegex> Compile(std::string_view pattern);

  // Sets *matches to the non-overlapping matches from left to right; text is well-formed UTF-8.
  // An empty match is reported unless it touches the match before it.
  void FindAll(std::string_view text, Scratch* scratch, std::vector<Match>* matches) const;

 private:
  enum class Op : uint8_t {
    kSet,
    kJump,
    kSplit,
    kLoop,
    kPossessiveLoop,
    kLookahead,
    kLineStart,
    kLineEnd,
    kTextStart,
    kTextEnd,
    kMatch
  };
  struct Instruction {
    Op op = Op::kMatch;
    bool negated = false;
    int set = -1;
    int min = 0;     // Loops only.
    int max = -1;    // Loops only; -1: no bound.
    int first = 0;   // kJump, kSplit: where to go on.
    int second = 0;  // kSplit: where to go on if that fails.
    int memo = -1;   // Row of Scratch::failed; -1 where a failure need not be remembered.
  };
  class Compiler;
  class Matcher;

  UnicodeRegex() = default;

  std::vector<Instruction> program_;
  std::vector<CharSet> sets_;
  int num_memos_ = 0;
};

}  // namespace writescope::tokenizer
