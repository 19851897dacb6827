// The experts' matrix products over all chosen (token, expert) pairs: two launches, one for gate
// and up with the activation between, one for down. Three kernels with one contract:
//   simt    any GPU, any weights; the plain twin of the others
//   stream  few slots to an expert: weights go from memory to registers once, and set the time
//   tile    many slots to an expert: shared memory, and the tensor cores set the time
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "engine/base/tile_layout.h"
#include "engine/kernels/cuda/router_cuda.h"
#include "engine/kernels/cuda/value_type.h"

namespace writescope::kernels {

enum class ExpertWeights { kF32, kBf16, kInt4 };

// bf16 matrices have rows of a multiple of 8 values, so that 16 bytes can be read at a time; the
// padding is zero.
WRITESCOPE_HOST_DEVICE constexpr int64_t Bf16Stride(int64_t cols) { return (cols + 7) / 8 * 8; }

// y = x * W^T by slots, with W of the slot's expert; or y = silu(x * W^T) * (x * up^T).
struct ExpertGemmArgs {
  ExpertWeights weights = ExpertWeights::kBf16;
  int rows = 0;  // Of W, the width of y
  int cols = 0;  // Of W, the width of x

  // Of expert 0; `up` is null for a plain product. kBf16: [rows, Bf16Stride(cols)].
  const std::byte* w = nullptr;
  const std::byte* up = nullptr;
  int64_t expert_stride_bytes = 0;

  const ExpertTile* tiles = nullptr;  // [num_tiles], of at most the kernel's slots each
  int num_tiles = 0;
  const int32_t* slot_pairs = nullptr;
  // The launch before this one does not write tiles and slot_pairs: it reads them, too.
  bool tiles_settled = false;

  // The row of x for a slot is its token, slot_pairs[slot] / experts_per_token, when x is by token,
  // and the slot otherwise. The row of y is the pair when y is by pair, and the slot otherwise.
  const void* x = nullptr;
  int64_t x_stride = 0;
  bool x_by_token = false;
  int experts_per_token = 1;
  void* y = nullptr;
  int64_t y_stride = 0;
  bool y_by_pair = false;
};

inline constexpr int kSimtSlots = 16;
inline constexpr int kStreamSlotsFew = 8;
inline constexpr int kStreamSlots = 16;
inline constexpr int kTileSlotsFew = 32;
inline constexpr int kTileSlots = 64;

// x and y of `type`. kF32 weights go with kF32 values, kBf16 with kBf16, kInt4 with either.
cudaError_t LaunchExpertGemmSimt(cudaStream_t stream, ValueType type, const ExpertGemmArgs& args);
// bf16 values, and kBf16 or kInt4 weights; sm_80 and later. `tile_slots` is one of kStreamSlots*,
// or of kTileSlots*.
cudaError_t LaunchExpertGemmStream(cudaStream_t stream, int tile_slots, const ExpertGemmArgs& args);
cudaError_t LaunchExpertGemmTile(cudaStream_t stream, int tile_slots, const ExpertGemmArgs& args);

}  // namespace writescope::kernels
