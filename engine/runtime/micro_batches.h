// Pure: a decode step's sequences in two parts that take turns.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace writescope::runtime {

// The sequences of each part, by number; each has at least one of at least two.
using MicroBatches = std::vector<std::vector<int>>;

struct SequenceLoad {
  int64_t spilled_bytes = 0;
  int first_block = -1;  // Sequences that share a beginning have the same; -1: none
};

// Two parts of as many sequences each, but for one, that read about as much: a part is attended to
// while the other's dense work runs. Those that share a beginning stay together where that keeps
// the numbers equal, since a block that both parts read is read twice. One part of fewer than two.
MicroBatches SplitInTwo(std::span<const SequenceLoad> sequences);

}  // namespace writescope::runtime
