// Who attends to a row in a turn, and who has left its sums to the others: most partials are then
// merged once, from worker to worker, and few where the device reads them.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

namespace writescope::attention {

// Thread-safe. A worker enters before it attends to the row and exits when it has all its sums. Who
// exits while others attend may leave its sums where they are; somebody who is to exit later takes
// them, so nobody waits, and once all have exited nothing is left.
class RowWorkers {
 public:
  static constexpr int kMaxWorkers = 40;  // Those after them leave nothing.
  // More would be much to merge for the last one, when the device waits for it.
  static constexpr int kMaxLeft = 2;
  static constexpr int kMaxCount = 0xff;

  struct Exit {
    bool leaves = false;  // Its sums are another's to merge.
    uint64_t taken = 0;   // Else: workers whose sums are now its own to merge, as bits
  };

  // Engine thread, before a step.
  void Clear() { state_.store(0, std::memory_order_relaxed); }

  // False while workers of another turn attend to the row, or as many as can be counted: this one
  // then is on its own, and does not exit.
  bool Enter(int turn) {
    uint64_t seen = state_.load(std::memory_order_relaxed);
    while (true) {
      if (Count(seen) == kMaxCount || (Count(seen) > 0 && Turn(seen) != turn)) return false;
      const uint64_t next = Pack(turn, Count(seen) + 1, Left(seen));
      if (state_.compare_exchange_weak(seen, next, std::memory_order_relaxed)) return true;
    }
  }
  Exit Leave(int turn, int worker, bool may_leave) {
    uint64_t seen = state_.load(std::memory_order_relaxed);
    while (true) {
      const bool leaves = may_leave && worker < kMaxWorkers && Count(seen) > 1 &&
                          std::popcount(Left(seen)) < kMaxLeft;
      const uint64_t left = leaves ? Left(seen) | uint64_t{1} << worker : 0;
      if (state_.compare_exchange_weak(seen, Pack(turn, Count(seen) - 1, left),
                                       std::memory_order_acq_rel)) {
        return {leaves, leaves ? 0 : Left(seen)};
      }
    }
  }

 private:
  static uint64_t Pack(int turn, int count, uint64_t left) {
    return static_cast<uint64_t>(turn) << 48 | static_cast<uint64_t>(count) << kMaxWorkers | left;
  }
  static int Turn(uint64_t state) { return static_cast<int>(state >> 48); }
  static int Count(uint64_t state) { return static_cast<int>(state >> kMaxWorkers & kMaxCount); }
  static uint64_t Left(uint64_t state) { return state & ((uint64_t{1} << kMaxWorkers) - 1); }

  std::atomic<uint64_t> state_{0};
};

}  // namespace writescope::attention
