// What a worker does for its claim while that waits for its query.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/attention/step_attention.h"
#include "engine/base/units.h"

namespace writescope::attention {

// Brings what a claim begins with towards the core, a little at each call.
class EarlyFetch {
 public:
  EarlyFetch(const StepContext& step, int turn, const std::vector<Run>& parts, int64_t block_bytes)
      : step_(step), layer_(step.layer(turn)), parts_(parts), block_bytes_(block_bytes) {}

  // False when there is nothing more to fetch.
  bool Next() {
    if (room_bytes_ <= 0 || part_ == parts_.size()) return false;
    const Run& run = parts_[part_];
    const std::byte* const at =
        step_.blocks->region(run.region).Address(layer_, run.first_index) + part_done_bytes_;
    for (int64_t i = 0; i < kFetchBytes; i += 64) __builtin_prefetch(at + i, 0, 2);
    room_bytes_ -= kFetchBytes;
    part_done_bytes_ += kFetchBytes;
    if (part_done_bytes_ >= run.num_blocks * block_bytes_) {
      part_done_bytes_ = 0;
      ++part_;
    }
    return true;
  }

 private:
  // What the second cache holds beside all else
  static constexpr int64_t kRoomBytes = 512 * kKiB;
  static constexpr int64_t kFetchBytes = kKiB;  // Between two looks at the query's flag

  const StepContext& step_;
  const int layer_;
  const std::vector<Run>& parts_;
  const int64_t block_bytes_;
  int64_t room_bytes_ = kRoomBytes;
  size_t part_ = 0;
  int64_t part_done_bytes_ = 0;
};

}  // namespace writescope::attention
