// The frame of the kernels that multiply whole blocks in bf16: rows in panels, their queries
// rounded once a panel, blocks in order, and the lines of the block after fetched meanwhile.
// Included by the files of one instruction set only; see simd_vec.h.
//
// A row meets a block in one of two ways. A block that it sees whole, as all sealed blocks of a
// decode step are, goes to the kernel's WholeBlock. Of one that it sees in part the f32 kernel
// computes: a weight of 0 does not hide a NaN in a slot that is not the row's to see. Which way it
// is depends on the row alone, so how a caller cuts rows into calls changes no bit of the result.
#pragma once

#include "engine/kernels/attention_partial_flat.h"
#include "engine/kernels/attention_rows_vec.h"
#include "engine/kernels/simd_vec.h"

namespace writescope::kernels {
namespace {

constexpr int kPanelRows = 16;  // Rows of an AMX tile
constexpr int kTileWords = 16;  // Words of a row of one
constexpr int kTileDims = 2 * kTileWords;
constexpr int kMaxKeyDim = 1024;  // Wider keys go the f32 way.
constexpr int kLineBytes = 64;    // Of the cache
// Blocks that every panel of a call attends to before the next ones: few enough that they stay in
// the second cache.
constexpr int kBlocksAtATime = 4;

// Queries of a panel as A tiles: q[dim / 32][row][(dim % 32) / 2] is a pair of dims. Rows past the
// panel's last are zero.
struct QueryTiles {
  alignas(64) uint32_t words[kMaxKeyDim / kTileDims][kPanelRows][kTileWords];
};

inline void RoundQueries(const FlatAttentionArgs& args, int first_row, int num_rows,
                         QueryTiles& tiles) {
  for (int tile = 0; tile < args.k_dim / kTileDims; ++tile) {
    for (int r = 0; r < kPanelRows; ++r) {
      auto* to = reinterpret_cast<std::byte*>(tiles.words[tile][r]);
      for (int d = 0; d < kTileDims; d += kLanes) {
        const Vec q = r < num_rows ? Load(args.q[first_row + r] + tile * kTileDims + d) : Vec{};
        StoreBf16(to + 2 * d, q);
      }
    }
  }
}

// Fetches the lines of the block after, a few at each step of the work on this one, so that the
// memory always has requests to serve and never more than it can queue.
class NextLines {
 public:
  NextLines(const FlatAttentionArgs& args, const KvHeadBlock* next, int64_t steps) {
    if (next == nullptr) return;
    const int64_t k_bytes = int64_t{kBlockTokens} * args.k_dim * 2;
    const int64_t v_bytes = args.value_in_key ? 0 : int64_t{kBlockTokens} * args.v_dim * 2;
    at_ = next->k;
    end_ = at_ + k_bytes;
    v_ = next->v;
    v_end_ = v_ + v_bytes;
    per_step_ = static_cast<int>(((k_bytes + v_bytes) / kLineBytes + steps - 1) / steps);
  }
  WRITESCOPE_INLINE void Fetch() {
    for (int i = 0; i < per_step_; ++i) {
      if (at_ == end_) {
        if (v_ == v_end_) {
          per_step_ = 0;
          return;
        }
        at_ = v_;
        end_ = v_ = v_end_;
      }
      __builtin_prefetch(at_, 0, 2);
      at_ += kLineBytes;
    }
  }

 private:
  const std::byte* at_ = nullptr;
  const std::byte* end_ = nullptr;
  const std::byte* v_ = nullptr;
  const std::byte* v_end_ = nullptr;
  int per_step_ = 0;
};

// The rows of a panel that see a block whole.
struct WholeRows {
  int first_row;  // Of the panel, in the arguments
  int num_rows;
  int row[kPanelRows];  // In the panel
};

template <typename Kernel>
inline void AttendBlock(const FlatAttentionArgs& args, int first_row, int num_rows,
                        const QueryTiles& q, const KvHeadBlock& block, const KvHeadBlock* next,
                        Kernel& kernel) {
  WholeRows whole = {.first_row = first_row, .num_rows = 0, .row = {}};
  for (int r = 0; r < num_rows; ++r) {
    const int row = first_row + r;
    const int seen = SeenTokens(args, block, row);
    if (seen == kBlockTokens) {
      whole.row[whole.num_rows++] = r;
    } else if (seen > 0) {
      FlatAttentionArgs part = args;
      part.blocks = &block;
      part.num_blocks = 1;
      part.next = nullptr;
      part.num_rows = 1;
      part.q += row;
      if (part.visible != nullptr) part.visible += row;
      part.o += row;
      part.m += row;
      part.l += row;
      Kernel::AttendInF32(part);
    }
  }
  if (whole.num_rows > 0) kernel.WholeBlock(args, whole, q, block, next);
}

template <typename Kernel>
inline void AttendByPanels(const FlatAttentionArgs& args) {
  if (args.is_f32 || args.k_dim > kMaxKeyDim) {
    Kernel::AttendInF32(args);
    return;
  }
  QueryTiles q;
  Kernel kernel;
  for (int64_t first_block = 0; first_block < args.num_blocks; first_block += kBlocksAtATime) {
    const int64_t last_block = first_block + kBlocksAtATime < args.num_blocks
                                   ? first_block + kBlocksAtATime
                                   : args.num_blocks;
    for (int first_row = 0; first_row < args.num_rows; first_row += kPanelRows) {
      const bool is_last = first_row + kPanelRows >= args.num_rows;
      const int num_rows = is_last ? args.num_rows - first_row : kPanelRows;
      if (first_block == 0 || args.num_rows > kPanelRows) {
        RoundQueries(args, first_row, num_rows, q);
      }
      for (int64_t i = first_block; i < last_block; ++i) {
        // The first panel brings these blocks into the cache, the last one those after them.
        const KvHeadBlock* next = nullptr;
        if (i + 1 < last_block) {
          if (first_row == 0) next = &args.blocks[i + 1];
        } else if (is_last) {
          next = i + 1 < args.num_blocks ? &args.blocks[i + 1] : args.next;
        }
        AttendBlock(args, first_row, num_rows, q, args.blocks[i], next, kernel);
      }
    }
  }
}

}  // namespace
}  // namespace writescope::kernels
