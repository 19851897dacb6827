// Fetches of KV towards the core, a fixed way ahead of the work. Included by the files of one
// instruction set only; see simd_vec.h.
//
// Where the way is short, lines are fetched into the first cache in the order in which they lie:
// such requests are what sets the hardware's own prefetcher on the way, which keeps far more lines
// in flight than a core can ask for by itself. Measured on Zen 5, where one core reads 39 GB/s:
// Qwen3's shape at 33 GB/s; with fetches into the second cache, a whole block ahead, 28; with none
// 16. On 14 threads of Emerald Rapids, which read 130 GB/s, it is the second cache: 113 GB/s
// against 105, and 72 with no fetches.
#pragma once

#include "engine/kernels/attention_partial_flat.h"
#include "engine/kernels/simd_vec.h"

namespace writescope::kernels {
namespace {

constexpr int kLineBytes = 64;  // Of the cache
// A plane of 128 dims: what is read several times, a plane of V by 2 or 4 rows at once, is fetched
// before its first time. More than this displaces what is in use.
constexpr int64_t kAheadBytes = 16384;
constexpr int64_t kBlockAhead = int64_t{1} << 40;  // As far as the whole block that comes later
// For blocks of two planes. The second cache has room.
WRITESCOPE_INLINE int64_t PlanesAhead(bool into_first_cache) {
  return into_first_cache ? kAheadBytes : kBlockAhead;
}

// The block that comes `count` after block i of a call, or null.
inline const KvHeadBlock* BlockAfter(const FlatAttentionArgs& args, int64_t i, int64_t count) {
  const int64_t at = i + count;
  if (at < args.num_blocks) return &args.blocks[at];
  return at - args.num_blocks < args.num_next ? &args.next[at - args.num_blocks] : nullptr;
}

// What one loop fetches while it works, a few lines at each step.
struct FetchedLines {
  const std::byte* at = nullptr;
  int per_step = 0;
  bool into_first_cache = false;

  WRITESCOPE_INLINE void Step() {
    if (into_first_cache) {
      for (int i = 0; i < per_step; ++i) __builtin_prefetch(at + i * kLineBytes, 0, 3);
    } else {
      for (int i = 0; i < per_step; ++i) __builtin_prefetch(at + i * kLineBytes, 0, 2);
    }
    at += per_step * kLineBytes;
  }
};

// Shares the lines that lie ahead of the work on a block, from the rest of it over to the next one,
// among the loops of that work: the memory always has requests to serve and never more than it can
// queue.
class LinesAhead {
 public:
  // Of k_bytes and v_bytes a block; `next` is null where nothing follows.
  LinesAhead(const KvHeadBlock& block, const KvHeadBlock* next, int64_t k_bytes, int64_t v_bytes,
             int64_t ahead_bytes, bool into_first_cache)
      : into_first_cache_(into_first_cache) {
    const int64_t bytes = k_bytes + v_bytes;
    const int64_t ahead = ahead_bytes < bytes ? ahead_bytes : bytes;
    Add(block.k, ahead, k_bytes);
    Add(block.v, ahead - k_bytes, v_bytes);
    if (next == nullptr) return;
    Add(next->k, 0, ahead < k_bytes ? ahead : k_bytes);
    Add(next->v, 0, ahead - k_bytes);
  }

  // `count` lines for a loop of so many steps. What is beyond a plane's end waits for the next
  // call.
  FetchedLines Take(int64_t count, int64_t steps) {
    Piece& piece = pieces_[piece_];
    const std::byte* const at = piece.at;
    const int64_t left = (piece.end - at) / kLineBytes;
    count += due_;
    due_ = 0;
    if (count < left) {
      piece.at += count * kLineBytes;
    } else {
      due_ = count - left;
      count = left;
      if (piece_ < num_pieces_) ++piece_;
    }
    return {at, static_cast<int>((count + steps - 1) / steps), into_first_cache_};
  }

 private:
  struct Piece {
    const std::byte* at = nullptr;
    const std::byte* end = nullptr;
  };
  void Add(const std::byte* plane, int64_t begin, int64_t end) {
    if (begin < 0) begin = 0;
    if (begin < end) pieces_[num_pieces_++] = {plane + begin, plane + end};
  }

  const bool into_first_cache_;
  Piece pieces_[5];  // The one after the last is empty.
  int num_pieces_ = 0;
  int piece_ = 0;
  int64_t due_ = 0;
};

}  // namespace
}  // namespace writescope::kernels
