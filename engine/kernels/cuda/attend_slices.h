// How a thread block of a slice kernel finds its work. Included by .cu files only.
#pragma once

#include <cstdint>

#include "engine/kernels/cuda/attend_work.h"
#include "engine/kernels/cuda/launch.h"

namespace writescope::kernels {

// A part of a panel: consecutive blocks of its span.
struct Slice {
  const Panel* panel;
  const PanelRow* rows;
  const std::byte* base;  // Of its first block
  int64_t first_position;
  int index;
  int num_tokens;
  int num_blocks;  // 0: there is none
};

__device__ inline SliceArrays ArraysOf(const SliceCall& call) {
  return FindSliceArrays(call.arrays != nullptr ? call.arrays : call.inlined, call.sizes);
}

__device__ inline int64_t PartialIndex(const SliceCall& call, const SliceSizes& sizes, int slice,
                                       int kv_head) {
  return (int64_t{slice} * call.rows.kv.num_kv_heads + kv_head) * sizes.num_slots;
}

// Where a thread block is on its way through the slices of its chunk. In shared memory: registers
// are for keys.
struct ChunkWalk {
  int chunk;
  int at;  // In the line of all blocks
  int end;
  int panel;
};

// By all lanes of one warp, which search 32-fold: each step is a read of memory before the first
// key can be asked for.
__device__ inline void BeginWalk(const SliceSizes& sizes, const Panel* panels, int chunk,
                                 ChunkWalk* walk) {
  const int at = ChunkBegin(sizes, chunk);
  const int lane = threadIdx.x % 32;
  int first = 0;
  int count = sizes.num_panels;
  while (count > 1) {
    const int step = (count + 31) / 32;
    const bool before = lane * step < count && panels[first + lane * step].first_block <= at;
    const int skipped = (__popc(__ballot_sync(~0u, before)) - 1) * step;
    first += skipped;
    count = count - skipped < step ? count - skipped : step;
  }
  if (lane != 0) return;
  walk->chunk = chunk;
  walk->at = at;
  walk->end = ChunkBegin(sizes, chunk + 1);
  walk->panel = first;
}

// By one thread.
__device__ inline void NextSlice(const SliceCall& call, const SliceArrays& arrays, ChunkWalk* walk,
                                 Slice* slice) {
  slice->num_blocks = 0;
  if (walk->at >= walk->end) return;
  const Panel& panel = arrays.panels[walk->panel];
  const int first = walk->at - panel.first_block;
  const int left = (panel.span.num_tokens + kBlockTokens - 1) / kBlockTokens - first;
  const int num_blocks = left < walk->end - walk->at ? left : walk->end - walk->at;
  const int tokens_left = panel.span.num_tokens - first * kBlockTokens;
  slice->panel = &panel;
  slice->rows = arrays.rows + panel.first_row;
  slice->base = panel.span.base + call.layer * panel.span.layer_stride_bytes +
                first * call.rows.kv.block_bytes();
  slice->first_position = panel.span.first_position + int64_t{first} * kBlockTokens;
  slice->index = walk->chunk + walk->panel;
  slice->num_tokens =
      tokens_left < num_blocks * kBlockTokens ? tokens_left : num_blocks * kBlockTokens;
  slice->num_blocks = num_blocks;
  walk->at += num_blocks;
  ++walk->panel;
}

// A thread block's slices: slices[i % 2] is the i-th, and the one after it is known in time for its
// keys to be asked for ahead. In shared memory.
struct SliceQueue {
  alignas(16) uint32_t inlined[kInlineBytes / 4];
  SliceSizes sizes;
  SliceArrays arrays;
  ChunkWalk walk;
  Slice slices[2];

  // By the whole thread block; false where there is no such chunk. Parameters of the launch are
  // copied by their own, fast, path: a read through a pointer to them costs as much as one of
  // device memory. A staged plan is read in one go, before its size is known: each further read
  // would cost another trip to memory.
  __device__ bool Begin(const SliceCall& call, int chunk) {
    const std::byte* at = call.arrays;
    if (call.staged != nullptr) {
      const uint4* from = reinterpret_cast<const uint4*>(call.staged + 1);
      uint4* to = reinterpret_cast<uint4*>(inlined);
      for (int i = threadIdx.x; i < kInlineBytes / 16; i += blockDim.x) to[i] = from[i];
      if (threadIdx.x == 0) sizes = *call.staged;
      __syncthreads();
      if (chunk >= sizes.num_chunks) return false;
      at = SliceArrayBytes(sizes) <= kInlineBytes ? reinterpret_cast<const std::byte*>(inlined)
                                                  : reinterpret_cast<const std::byte*>(from);
    } else {
      if (chunk >= call.sizes.num_chunks) return false;
      if (at == nullptr) {
        const int num_words = static_cast<int>(SliceArrayBytes(call.sizes) / 4);
        for (int i = threadIdx.x; i < num_words; i += blockDim.x) {
          inlined[i] = reinterpret_cast<const uint32_t*>(call.inlined)[i];
        }
        at = reinterpret_cast<const std::byte*>(inlined);
      }
      if (threadIdx.x == 0) sizes = call.sizes;
      __syncthreads();
    }
    if (threadIdx.x == 0) arrays = FindSliceArrays(at, sizes);
    __syncthreads();
    if (threadIdx.x < 32) {
      BeginWalk(sizes, arrays.panels, chunk, &walk);
      if (threadIdx.x == 0) NextSlice(call, arrays, &walk, &slices[0]);
    }
    __syncthreads();
    return true;
  }
  // Before the work on slice i; there for all after the next barrier.
  __device__ void LookAhead(const SliceCall& call, int i) {
    if (threadIdx.x == 0) NextSlice(call, arrays, &walk, &slices[(i + 1) % 2]);
  }
};

// The state that slot `slot` of a panel belongs to, of rows x heads.
__device__ inline int64_t SlotState(const SliceCall& call, const Slice& slice, int kv_head,
                                    int slot) {
  const int heads = slice.panel->num_heads;
  const int group = call.rows.num_heads / call.rows.kv.num_kv_heads;
  return int64_t{slice.rows[slot / heads].row} * call.rows.num_heads + kv_head * group +
         slice.panel->first_head + slot % heads;
}

// Slice kernels read their plan before they wait for the kernel before, so they may begin early
// only where no kernel just before wrote the plan: where it is staged.
inline cudaError_t LaunchSlices(cudaStream_t stream, void (*kernel)(const SliceCall), dim3 grid,
                                int threads, size_t shared_bytes, const SliceCall& call) {
  if (call.staged != nullptr) return LaunchEarly(stream, kernel, grid, threads, shared_bytes, call);
  kernel<<<grid, threads, shared_bytes, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace writescope::kernels
