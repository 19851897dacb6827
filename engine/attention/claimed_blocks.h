// What a worker has claimed and not begun with, of which others may take a part: a claim can then
// be large, so that a worker meets few sequences, and a layer still ends for all at the same time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "engine/base/check.h"

namespace writescope::attention {

// Thread-safe, but for what only the owner may do. Blocks of one turn: they are numbered as the
// worker that claimed them likes, and whoever takes some is the only one to have them. Lists of
// two turns are told apart, since a worker may look for more in a turn that another is done with.
// A line of its own.
class alignas(64) ClaimedBlocks {
 public:
  struct Range {
    int64_t first = 0;
    int64_t count = 0;  // 0: there is nothing
  };
  static constexpr int64_t kMaxTurns = int64_t{1} << 16;
  static constexpr int64_t kMaxBlocks = int64_t{1} << 24;

  // Engine thread, before a step.
  void Clear() { left_.store(0, std::memory_order_relaxed); }
  // Owner. What it had is taken.
  void Set(int turn, Range range) {
    CHECK(turn < kMaxTurns && range.first + range.count < kMaxBlocks)
        << "turn " << turn << ", " << range.count << " blocks from " << range.first;
    left_.store(Pack(turn, range.first, range.count), std::memory_order_release);
  }
  Range left(int turn) const { return Unpack(left_.load(std::memory_order_acquire), turn); }

  // Owner: half of what is left, at least `least` and at most `most`, from its begin.
  Range TakeFirst(int turn, int64_t least, int64_t most) {
    uint64_t seen = left_.load(std::memory_order_acquire);
    while (true) {
      const Range range = Unpack(seen, turn);
      const int64_t count =
          std::min(range.count, std::clamp(range.count / 2, least, std::max(least, most)));
      if (count == 0) return {};
      if (left_.compare_exchange_weak(seen, Pack(turn, range.first + count, range.count - count),
                                      std::memory_order_acq_rel)) {
        return {range.first, count};
      }
    }
  }
  // Another worker: half of what is left, rounded up, from its end. Nothing where fewer than
  // `least` are left.
  Range TakeLast(int turn, int64_t least) {
    uint64_t seen = left_.load(std::memory_order_acquire);
    while (true) {
      const Range range = Unpack(seen, turn);
      if (range.count == 0 || range.count < least) return {};
      const int64_t count = (range.count + 1) / 2;
      if (left_.compare_exchange_weak(seen, Pack(turn, range.first, range.count - count),
                                      std::memory_order_acq_rel)) {
        return {range.first + range.count - count, count};
      }
    }
  }

 private:
  static uint64_t Pack(int turn, int64_t first, int64_t count) {
    return static_cast<uint64_t>(turn) << 48 | static_cast<uint64_t>(first) << 24 |
           static_cast<uint64_t>(count);
  }
  static Range Unpack(uint64_t packed, int turn) {
    if (packed >> 48 != static_cast<uint64_t>(turn)) return {};
    return {static_cast<int64_t>(packed >> 24 & (kMaxBlocks - 1)),
            static_cast<int64_t>(packed & (kMaxBlocks - 1))};
  }

  std::atomic<uint64_t> left_{0};
};

}  // namespace writescope::attention
