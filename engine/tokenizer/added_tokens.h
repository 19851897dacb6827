// Tokens that are found in the text before any other step: control tokens and the like.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/base/units.h"

namespace writescope::tokenizer {

struct AddedToken {
  TokenId id = -1;
  std::string content;
  bool special = false;     // Left out when text is decoded for a reader.
  bool normalized = false;  // Looked for after those that are not.
  bool lstrip = false;      // Takes white space on its left with it.
  bool rstrip = false;
  bool single_word = false;  // No match inside a word.

  // Whether finding it in a user's text would let the user steer the model. Files mark only some
  // of these as special (DeepSeek's <｜User｜> and Qwen's <think> are not); the tokens that are
  // plain text are runs of white space.
  bool IsControl() const;
};

// Half-open range of byte offsets.
struct ByteRange {
  size_t begin;
  size_t end;
};

// Thread-safe: never changes after it is made.
class AddedTokenMatcher {
 public:
  struct Match {
    size_t begin;
    size_t end;
    TokenId id;
  };

  explicit AddedTokenMatcher(std::vector<AddedToken> tokens);

  bool empty() const { return tokens_.empty(); }

  // Appends the matches within `range`, leftmost first and longest at equal starts, without
  // overlap. A control token, with the white space that it takes along, lies in one of
  // `control_ranges` (ascending, disjoint, not adjacent). Time: length of the text times that of
  // the longest token.
  void Find(std::string_view text, ByteRange range, std::span<const ByteRange> control_ranges,
            std::vector<Match>* matches) const;

 private:
  // The longest token that starts at `pos` and ends within its limit; nullptr: none.
  const AddedToken* LongestAt(std::string_view text, size_t pos, size_t end,
                              size_t control_end) const;

  std::vector<AddedToken> tokens_;
  absl::flat_hash_map<uint64_t, uint32_t> children_;  // node << 8 | byte -> node
  std::vector<int> token_at_;                         // By node: index of the token that ends here.
  bool starts_[256] = {};                             // Bytes with which some token starts.
};

}  // namespace writescope::tokenizer
