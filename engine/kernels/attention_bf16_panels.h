// The frame of the kernels that multiply whole blocks in bf16: rows in panels, their queries
// rounded once a panel, and blocks in order.
// Included by the files of one instruction set only; see simd_vec.h.
//
// A row meets a block in one of two ways. A block that it sees whole, as all sealed blocks of a
// decode step are, goes to the kernel's WholeBlock. Of one that it sees in part the f32 kernel
// computes: a weight of 0 does not hide a NaN in a slot that is not the row's to see. Which way it
// is depends on the row alone, so how a caller cuts rows into calls changes no bit of the result.
#pragma once

#include "engine/kernels/attention_partial_flat.h"
#include "engine/kernels/attention_rows_vec.h"
#include "engine/kernels/lines_ahead.h"
#include "engine/kernels/simd_vec.h"

namespace writescope::kernels {
namespace {

constexpr int kPanelRows = 16;  // Rows of an AMX tile
constexpr int kTileWords = 16;  // Words of a row of one
constexpr int kTileDims = 2 * kTileWords;
constexpr int kMaxKeyDim = 1024;  // Wider keys go the f32 way.
// Blocks that every panel of a call attends to before the next ones: few enough that they stay in
// the second cache.
constexpr int kBlocksAtATime = 4;

constexpr int kMaxQueryTiles = kMaxKeyDim / kTileDims;
// Queries of a panel as A tiles: q[dim / 32][row][(dim % 32) / 2] is a pair of dims. Rows past the
// panel's last are zero where the kernel multiplies by whole tiles.
using QueryTiles = const uint32_t (*)[kPanelRows][kTileWords];
// The queries come first in KeptState::memory, then what a kernel keeps.
constexpr int64_t kQueryBytes = int64_t{4} * kMaxQueryTiles * kPanelRows * kTileWords;

inline void RoundQueries(const FlatAttentionArgs& args, int first_row, int num_rows,
                         int num_padded_rows, uint32_t (*tiles)[kPanelRows][kTileWords]) {
  for (int tile = 0; tile < args.k_dim / kTileDims; ++tile) {
    for (int r = 0; r < num_padded_rows; ++r) {
      auto* to = reinterpret_cast<std::byte*>(tiles[tile][r]);
      for (int d = 0; d < kTileDims; d += kLanes) {
        const Vec q = r < num_rows ? Load(args.q[first_row + r] + tile * kTileDims + d) : Vec{};
        StoreBf16(to + 2 * d, q);
      }
    }
  }
}

// The rows of a panel that see a block whole.
struct WholeRows {
  int first_row;  // Of the panel, in the arguments
  int num_rows;
  int row[kPanelRows];  // In the panel
};

template <typename Kernel>
inline void AttendBlock(const FlatAttentionArgs& args, int first_row, int num_rows, QueryTiles q,
                        const KvHeadBlock& block, const KvHeadBlock* next, Kernel& kernel) {
  WholeRows whole = {.first_row = first_row, .num_rows = 0, .row = {}};
  for (int r = 0; r < num_rows; ++r) {
    const int row = first_row + r;
    const int seen = SeenTokens(args, block, row);
    if (seen == kBlockTokens) {
      whole.row[whole.num_rows++] = r;
    } else if (seen > 0) {
      kernel.End(args, first_row, num_rows);
      FlatAttentionArgs part = args;
      part.blocks = &block;
      part.num_blocks = 1;
      part.num_heads = 1;
      part.num_next = 0;
      part.num_rows = 1;
      part.q += row;
      if (part.visible != nullptr) part.visible += row;
      part.o += row;
      part.m += row;
      part.l += row;
      Kernel::AttendInF32(part);
      kernel.Begin(args, first_row, num_rows);
    }
  }
  if (whole.num_rows > 0) kernel.WholeBlock(args, whole, q, block, next);
}

// All rows of a head are one panel, and the queries of all heads fit: blocks come one by one.
template <typename Kernel>
inline void AttendByOnePanel(const FlatAttentionArgs& args, Kernel& kernel,
                             uint32_t (*q)[kPanelRows][kTileWords]) {
  const int head_tiles = args.k_dim / kTileDims;
  for (int head = 0; head < args.num_heads && !args.kept.is_left; ++head) {
    RoundQueries(args, head * args.num_rows, args.num_rows,
                 Kernel::kWholeTiles ? kPanelRows : args.num_rows, q + head * head_tiles);
  }
  const bool is_one = args.num_heads == 1;
  if (is_one && args.kept.is_left) {
    kernel.Resume(args, args.num_rows);
  } else if (is_one) {
    kernel.Begin(args, 0, args.num_rows);
  }
  for (int64_t i = 0; i < args.num_blocks; ++i) {
    const int head = static_cast<int>(i % args.num_heads);
    const int first_row = head * args.num_rows;
    const KvHeadBlock* next = BlockAfter(args, i, Kernel::kAhead);
    if (!is_one) kernel.Begin(args, first_row, args.num_rows);
    AttendBlock(args, first_row, args.num_rows, q + head * head_tiles, args.blocks[i], next,
                kernel);
    if (!is_one) kernel.End(args, first_row, args.num_rows);
  }
  if (is_one && args.kept.leave) {
    kernel.Suspend(args);
  } else if (is_one) {
    kernel.End(args, 0, args.num_rows);
  }
}

// A few blocks of one head at a time, for one panel after the other.
template <typename Kernel>
inline void AttendByManyPanels(const FlatAttentionArgs& args, Kernel& kernel,
                               uint32_t (*q)[kPanelRows][kTileWords]) {
  const int64_t at_a_time = args.num_heads == 1 ? kBlocksAtATime : 1;
  for (int64_t first_block = 0; first_block < args.num_blocks; first_block += at_a_time) {
    const int64_t last_block =
        first_block + at_a_time < args.num_blocks ? first_block + at_a_time : args.num_blocks;
    const int begin = static_cast<int>(first_block % args.num_heads) * args.num_rows;
    const int end = begin + args.num_rows;
    for (int first_row = begin; first_row < end; first_row += kPanelRows) {
      const bool is_last = first_row + kPanelRows >= end;
      const int num_rows = is_last ? end - first_row : kPanelRows;
      RoundQueries(args, first_row, num_rows, Kernel::kWholeTiles ? kPanelRows : num_rows, q);
      kernel.Begin(args, first_row, num_rows);
      for (int64_t i = first_block; i < last_block; ++i) {
        // The first panel brings these blocks into the cache, the last one those after them.
        const KvHeadBlock* next = nullptr;
        if (i + 1 < last_block) {
          if (first_row == begin) next = &args.blocks[i + 1];
        } else if (is_last) {
          next = BlockAfter(args, i, 1);
        }
        AttendBlock(args, first_row, num_rows, q, args.blocks[i], next, kernel);
      }
      kernel.End(args, first_row, num_rows);
    }
  }
}

template <typename Kernel>
inline void AttendByPanels(const FlatAttentionArgs& args) {
  if (args.is_f32 || args.k_dim > kMaxKeyDim) {
    Kernel::AttendInF32(args);
    return;
  }
  if (args.num_rows == 0) return;
  alignas(64) uint32_t q[kMaxQueryTiles][kPanelRows][kTileWords];
  Kernel kernel(args.num_rows < kPanelRows ? args.num_rows : kPanelRows);
  if (args.num_rows <= kPanelRows && args.num_heads * (args.k_dim / kTileDims) <= kMaxQueryTiles) {
    auto* const kept_q = reinterpret_cast<uint32_t(*)[kPanelRows][kTileWords]>(args.kept.memory);
    AttendByOnePanel(args, kernel, args.kept.memory != nullptr ? kept_q : q);
  } else {
    AttendByManyPanels(args, kernel, q);
  }
}

}  // namespace
}  // namespace writescope::kernels
