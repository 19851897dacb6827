// How a thread block of a tile kernel finds its rows and its keys. Included by .cu files only.
#pragma once

#include <cstdint>

#include "engine/kernels/cuda/attend_work.h"

namespace writescope::kernels {

__device__ inline TileArrays ArraysOf(const TileCall& call) {
  return FindTileArrays(call.arrays != nullptr ? call.arrays : call.inlined, call.sizes);
}

// Rows of one reader and heads of one KV head: pair i of the tile is pair first_pair + i of the
// reader, which is row pair / group, head pair % group. Neighbours in a tile are at neighbouring
// positions, so that a tile's causal border is short.
struct RowTile {
  const TileReader* reader;
  int first_pair;
  int num_pairs;  // In the tile
  int group;
  int kv_head;

  __device__ int64_t Position(int i) const {
    return reader->first_position + (first_pair + i) / group;
  }
  // Of rows x heads.
  __device__ int64_t State(const AttendRows& rows, int i) const {
    const int pair = first_pair + i;
    return int64_t{reader->first_row + pair / group} * rows.num_heads + kv_head * group +
           pair % group;
  }
};

__device__ inline RowTile FindRowTile(const TileCall& call, int tile, int tile_rows, int kv_head) {
  const TileReader* readers = ArraysOf(call).readers;
  int reader = 0;
  int above = call.sizes.num_readers;
  while (above - reader > 1) {
    const int middle = (reader + above) / 2;
    if (readers[middle].first_tile <= tile) {
      reader = middle;
    } else {
      above = middle;
    }
  }
  RowTile found;
  found.reader = readers + reader;
  found.group = call.rows.num_heads / call.rows.kv.num_kv_heads;
  found.kv_head = kv_head;
  found.first_pair = (tile - found.reader->first_tile) * tile_rows;
  const int left = found.reader->num_rows * found.group - found.first_pair;
  found.num_pairs = left < tile_rows ? left : tile_rows;
  return found;
}

// One head of one block.
struct HeadBlock {
  const std::byte* k;
  int64_t first_position;
  int num_tokens;
};

// Goes through the blocks of a reader's spans that a position sees.
class BlockCursor {
 public:
  __device__ BlockCursor(const TileCall& call, const RowTile& tile, int64_t last_position)
      : span_(ArraysOf(call).spans + tile.reader->first_span),
        spans_end_(span_ + tile.reader->num_spans),
        last_position_(last_position),
        block_bytes_(call.rows.kv.block_bytes()),
        head_offset_(tile.kv_head * call.rows.kv.head_bytes()) {
    Enter();
  }

  __device__ bool Next(HeadBlock* block) {
    while (block_ >= num_blocks_) {
      if (span_ == spans_end_ || ++span_ == spans_end_) return false;
      Enter();
    }
    const int tokens = span_->num_tokens - block_ * kBlockTokens;
    block->k = span_->base + block_ * block_bytes_ + head_offset_;
    block->first_position = span_->first_position + int64_t{block_} * kBlockTokens;
    block->num_tokens = tokens < kBlockTokens ? tokens : kBlockTokens;
    ++block_;
    return true;
  }

 private:
  __device__ void Enter() {
    block_ = 0;
    num_blocks_ = 0;
    if (span_ == spans_end_ || last_position_ < span_->first_position) return;
    const int64_t seen = last_position_ + 1 - span_->first_position;
    const int64_t tokens = seen < span_->num_tokens ? seen : span_->num_tokens;
    num_blocks_ = static_cast<int>((tokens + kBlockTokens - 1) / kBlockTokens);
  }

  const KvSpan* span_;
  const KvSpan* spans_end_;
  int64_t last_position_;
  int64_t block_bytes_;
  int64_t head_offset_;
  int block_ = 0;
  int num_blocks_ = 0;
};

}  // namespace writescope::kernels
