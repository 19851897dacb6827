// One cursor in a list of blocks, claimed from both ends: the pump takes from the front, CPU
// workers from the back. A claim is final: the side that made it does the work.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace writescope::attention {

// Reset comes before the first claim. ClaimFront: one thread; the rest is thread-safe. Claims are
// sequentially consistent, since the end of a layer is found by comparing them with another counter
// (StepContext::SignalIfDone).
class MeetCursor {
 public:
  struct Claim {
    int64_t first = 0;
    int64_t count = 0;  // 0: nothing is left on this side
  };

  // `cut` < 0: both sides claim until they meet. Else the front ends at `cut` and the back begins
  // there.
  void Reset(int64_t num_blocks, int64_t cut = -1) {
    num_blocks_ = num_blocks;
    max_front_ = cut < 0 ? num_blocks : cut;
    max_back_ = cut < 0 ? num_blocks : num_blocks - cut;
    claimed_.store(0, std::memory_order_release);
  }

  Claim ClaimFront(int64_t wanted) {
    uint64_t seen = claimed_.load(std::memory_order_acquire);
    while (true) {
      const int64_t front = Front(seen);
      const int64_t count =
          std::min({wanted, max_front_ - front, num_blocks_ - front - Back(seen)});
      if (count <= 0) return {};
      if (claimed_.compare_exchange_weak(seen, Pack(front + count, Back(seen)),
                                         std::memory_order_seq_cst)) {
        return {front, count};
      }
    }
  }

  Claim ClaimBack(int64_t wanted) {
    uint64_t seen = claimed_.load(std::memory_order_acquire);
    while (true) {
      const int64_t back = Back(seen);
      const int64_t count = std::min({wanted, max_back_ - back, num_blocks_ - Front(seen) - back});
      if (count <= 0) return {};
      if (claimed_.compare_exchange_weak(seen, Pack(Front(seen), back + count),
                                         std::memory_order_seq_cst)) {
        return {num_blocks_ - back - count, count};
      }
    }
  }

  int64_t front() const { return Front(claimed_.load(std::memory_order_acquire)); }
  int64_t back() const { return Back(claimed_.load(std::memory_order_acquire)); }
  int64_t remaining() const {
    const uint64_t seen = claimed_.load(std::memory_order_seq_cst);
    return num_blocks_ - Front(seen) - Back(seen);
  }
  // What the back may still claim.
  int64_t remaining_back() const {
    const uint64_t seen = claimed_.load(std::memory_order_acquire);
    return std::min(max_back_ - Back(seen), num_blocks_ - Front(seen) - Back(seen));
  }
  // Every block has been claimed.
  bool exhausted() const { return remaining() == 0; }

 private:
  static int64_t Front(uint64_t packed) { return static_cast<int64_t>(packed >> 32); }
  static int64_t Back(uint64_t packed) { return static_cast<int64_t>(packed & 0xffffffffu); }
  static uint64_t Pack(int64_t front, int64_t back) {
    return static_cast<uint64_t>(front) << 32 | static_cast<uint64_t>(back);
  }

  std::atomic<uint64_t> claimed_{0};
  int64_t num_blocks_ = 0;
  int64_t max_front_ = 0;
  int64_t max_back_ = 0;
};

}  // namespace writescope::attention
