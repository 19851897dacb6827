// How a thread block of a slice kernel finds its work. Included by .cu files only.
#pragma once

#include <cstdint>

#include "engine/kernels/cuda/attend_work.h"

namespace writescope::kernels {

// A part of a panel: blocks [first_block, first_block + num_blocks) of its span.
struct Slice {
  int index;
  const Panel* panel;
  const PanelRow* rows;
  const std::byte* base;  // Of its first block
  int64_t first_position;
  int num_tokens;
  int num_blocks;
};

__device__ inline SliceArrays ArraysOf(const SliceCall& call) {
  return FindSliceArrays(call.arrays != nullptr ? call.arrays : call.inlined, call.sizes);
}

__device__ inline int64_t PartialIndex(const SliceCall& call, int slice, int kv_head) {
  return (int64_t{slice} * call.rows.kv.num_kv_heads + kv_head) * call.sizes.num_slots;
}

// Goes through the slices of one chunk.
class SliceCursor {
 public:
  __device__ SliceCursor(const SliceCall& call, int chunk)
      : call_(call),
        arrays_(ArraysOf(call)),
        chunk_(chunk),
        at_(ChunkBegin(call.sizes, chunk)),
        end_(ChunkBegin(call.sizes, chunk + 1)) {
    int above = call.sizes.num_panels;
    while (above - panel_ > 1) {
      const int middle = (panel_ + above) / 2;
      if (arrays_.panels[middle].first_block <= at_) {
        panel_ = middle;
      } else {
        above = middle;
      }
    }
  }

  __device__ bool Next(Slice* slice) {
    if (at_ >= end_) return false;
    const Panel& panel = arrays_.panels[panel_];
    const int first = at_ - panel.first_block;
    const int panel_blocks = (panel.span.num_tokens + kBlockTokens - 1) / kBlockTokens;
    const int left = panel_blocks - first;
    const int num_blocks = left < end_ - at_ ? left : end_ - at_;
    const int tokens_left = panel.span.num_tokens - first * kBlockTokens;
    slice->index = chunk_ + panel_;
    slice->panel = &panel;
    slice->rows = arrays_.rows + panel.first_row;
    slice->base = panel.span.base + first * call_.rows.kv.block_bytes();
    slice->first_position = panel.span.first_position + int64_t{first} * kBlockTokens;
    slice->num_tokens =
        tokens_left < num_blocks * kBlockTokens ? tokens_left : num_blocks * kBlockTokens;
    slice->num_blocks = num_blocks;
    at_ += num_blocks;
    ++panel_;
    return true;
  }

 private:
  const SliceCall& call_;
  SliceArrays arrays_;
  int chunk_;
  int at_;  // In the line of all blocks
  int end_;
  int panel_ = 0;
};

// The state that slot `slot` of a panel belongs to, of rows x heads.
__device__ inline int64_t SlotState(const SliceCall& call, const Slice& slice, int kv_head,
                                    int slot) {
  const int heads = slice.panel->num_heads;
  const int group = call.rows.num_heads / call.rows.kv.num_kv_heads;
  return int64_t{slice.rows[slot / heads].row} * call.rows.num_heads + kv_head * group +
         slice.panel->first_head + slot % heads;
}

}  // namespace writescope::kernels
