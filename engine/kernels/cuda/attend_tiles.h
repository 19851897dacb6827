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

// The span of a block of the call.
__device__ inline const KvSpan* FindSpan(const TileArrays& arrays, int num_spans, int block) {
  int span = 0;
  int above = num_spans;
  while (above - span > 1) {
    const int middle = (span + above) / 2;
    if (arrays.spans[middle].first_block <= block) {
      span = middle;
    } else {
      above = middle;
    }
  }
  return arrays.spans + span;
}

// One head of one block.
struct HeadBlock {
  const std::byte* k;  // Null: there is none.
  int64_t first_position;
  int num_tokens;
};

// A thread block's blocks in order: those of the reader's spans that a position sees. Block i is
// blocks[i % 3], and the one after it is known in time to be copied ahead. In shared memory:
// registers are for the output.
struct BlockQueue {
  const KvSpan* span;
  const KvSpan* spans_end;
  int64_t last_position;
  int64_t block_bytes;
  int64_t head_offset;
  int block;  // Of the span
  int num_blocks;
  HeadBlock blocks[3];

  // By the whole thread block.
  __device__ void Begin(const TileCall& call, const RowTile& tile) {
    if (threadIdx.x == 0) {
      span = ArraysOf(call).spans + tile.reader->first_span;
      spans_end = span + tile.reader->num_spans;
      last_position = tile.Position(tile.num_pairs - 1);
      block_bytes = call.rows.kv.block_bytes();
      head_offset = tile.kv_head * call.rows.kv.head_bytes();
      EnterSpan();
      Next(&blocks[0]);
      Next(&blocks[1]);
    }
    __syncthreads();
  }
  // During the work on block i, after a barrier that ended the work on block i - 1; there for all
  // after the next barrier.
  __device__ void LookAhead(int i) {
    if (threadIdx.x == 0) Next(&blocks[(i + 2) % 3]);
  }

 private:
  __device__ void EnterSpan() {
    block = 0;
    num_blocks = 0;
    if (span == spans_end || last_position < span->first_position) return;
    const int64_t seen = last_position + 1 - span->first_position;
    const int64_t tokens = seen < span->num_tokens ? seen : span->num_tokens;
    num_blocks = static_cast<int>((tokens + kBlockTokens - 1) / kBlockTokens);
  }

  __device__ void Next(HeadBlock* next) {
    next->k = nullptr;
    while (block >= num_blocks) {
      if (span == spans_end || ++span == spans_end) return;
      EnterSpan();
    }
    const int tokens = span->num_tokens - block * kBlockTokens;
    next->k = span->base + block * block_bytes + head_offset;
    next->first_position = span->first_position + int64_t{block} * kBlockTokens;
    next->num_tokens = tokens < kBlockTokens ? tokens : kBlockTokens;
    ++block;
  }
};

}  // namespace writescope::kernels
