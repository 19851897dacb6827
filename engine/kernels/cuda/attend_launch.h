// Launches of the attention kernels. Each checks little, allocates nothing and waits for nothing;
// a call with no work launches a kernel that ends at once, which is how kernels are loaded early.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "engine/kernels/cuda/attend_work.h"

namespace writescope::kernels {

// Copies arrays from mapped host memory to device memory; `size_bytes` is a multiple of 4.
cudaError_t LaunchStageArrays(cudaStream_t stream, const std::byte* from, std::byte* to,
                              int64_t size_bytes);

// Makes `count` states (rows x heads) empty; their values stay as they are.
cudaError_t LaunchResetStates(cudaStream_t stream, int64_t count, float* m, float* l);

// A kernel that attends to slices, and how its work is best cut.
struct SliceKernel {
  // Once before the first launch on a device.
  cudaError_t (*prepare)() = nullptr;
  cudaError_t (*launch)(cudaStream_t stream, const SliceCall& call) = nullptr;
  int shared_bytes = 0;          // Of a thread block, where it is more than 48 KiB
  int blocks_per_processor = 1;  // Thread blocks that run at once on a multiprocessor
  int min_chunk_blocks = 1;      // KV blocks that are worth a thread block
};

// Any dims up to kSimtMaxDim, either dtype, float32 throughout, no instruction after sm_75.
inline constexpr int kSimtMaxDim = 1024;
SliceKernel SimtKernel();
// On tensor cores, for bf16; q and the weights are rounded to bf16. `launch` is null where there is
// none for such a cache.
SliceKernel DecodeKernel(const KvGeometry& kv);

// Folds the partials of each row into its state.
cudaError_t LaunchFoldPartials(cudaStream_t stream, const SliceCall& call);

// The end of a staged call whose slices are all that its rows see: what resetting, folding and
// merging states comes to, without states.
struct FinishCall {
  KvGeometry kv;
  int num_heads;
  const SliceSizes* staged;  // As in SliceCall
  int num_folds;             // Of the plan
  int max_heads;             // The most that a fold has
  Partials partials;
  int out_dim;
  void* out;  // [rows, num_heads, out_dim], float or bf16
  bool out_bf16;
};
cudaError_t LaunchFinishRows(cudaStream_t stream, const FinishCall& call);

// A kernel that takes tiles of rows on from their states.
struct TileKernel {
  // Once before the first launch on a device.
  cudaError_t (*prepare)() = nullptr;
  cudaError_t (*launch)(cudaStream_t stream, const TileCall& call) = nullptr;
  int shared_bytes = 0;
  int tile_rows = 1;  // (Query row, head of a group) pairs
  // What it needs of TileCall::scratch for each block of the call, which no other call may use
  // meanwhile.
  int64_t scratch_block_bytes = 0;
};

// On tensor cores, as DecodeKernel.
TileKernel PrefillKernel(const KvGeometry& kv);

// On the products of warpgroups, which compute capability 9.0 alone has; with states and rounding
// as PrefillKernel's. `launch` is null too where this build has no code for sm_90a.
TileKernel WarpgroupPrefillKernel(const KvGeometry& kv);

// The same for latents that have become keys of 128 dims and 64 more that all heads share, and
// values of 128, for each head. It finds them in the scratch (attend_operands.h): `launch` does not
// make them.
TileKernel LatentHeadsKernel(const KvGeometry& heads);

// The end: out = state merged with the CPU's partials; see MergeArgs in ops.h.
struct MergeCall {
  int64_t count;  // Rows x heads
  int v_dim;
  int out_dim;
  const float* o;
  const float* m;
  const float* l;
  const float* cpu_out;  // Mapped, or null
  float* cpu_lse;        // Mapped; set to -inf
  const uint32_t* failed;
  bool behind_wait;  // The kernel before has ended, or waits for the CPU's flag and has seen it
  void* out;         // [count, out_dim], float or bf16
  bool out_bf16;
};
cudaError_t LaunchMergeStates(cudaStream_t stream, const MergeCall& call);

}  // namespace writescope::kernels
