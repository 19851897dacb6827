// Ends a stream of text at the first stop string.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"

namespace writescope::tokenizer {

// One per request, for one thread. The match is the one that ends first; of several that end
// there, the longest. What comes out does not depend on how the text was cut into deltas. Time is
// linear in the text.
class StopMatcher {
 public:
  // InvalidArgument for an empty stop string. No stop strings: everything passes.
  static absl::StatusOr<StopMatcher> Create(std::span<const std::string> stops);

  // The text that may be shown now. Held back is only the longest suffix of the text so far that
  // is a proper prefix of a stop string; a stop string that has matched never comes out, nor does
  // anything behind it.
  std::string Push(std::string_view delta);

  // The text has ended: what was held back. Nothing after a match.
  std::string Finish();

  // Index of the stop string that has matched.
  std::optional<int> matched_stop() const { return matched_stop_; }

 private:
  struct Node {
    uint32_t fallback = 0;  // The longest proper suffix of this prefix that is also a prefix.
    int depth = 0;          // Bytes of this prefix.
    int stop = -1;          // The longest stop string that is a suffix of this prefix.
  };

  StopMatcher() = default;
  uint32_t Advance(uint32_t node, unsigned char byte) const;

  std::vector<Node> nodes_;
  absl::flat_hash_map<uint64_t, uint32_t> children_;  // node << 8 | byte -> node
  std::vector<int> stop_bytes_;                       // Length of each stop string.
  uint32_t state_ = 0;
  std::string held_;  // Ends with the prefix that state_ stands for; bytes before begin_ are out.
  size_t begin_ = 0;
  std::optional<int> matched_stop_;
};

}  // namespace writescope::tokenizer
