// The experts' matrix products over all chosen (token, expert) pairs: two launches, one for gate
// and up with the activation between, one for down. Five kernels with one contract:
//   simt    any GPU, any weights; the plain twin of the others
//   stream  few slots to an expert: weights go from memory to registers once, and set the time
//   ring    the same for 4-bit weights on sm_90: bulk copies bring them into shared memory
//   tile    many slots to an expert: shared memory, and the tensor cores set the time
//   wide    the same for 4-bit weights on sm_90a: products of whole warpgroups
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "engine/base/tile_layout.h"
#include "engine/kernels/cuda/router_cuda.h"
#include "engine/kernels/cuda/value_type.h"
#include "engine/kernels/quantize_int4.h"

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
  // The columns of x, or of y, lie in the order in which kInt4's fragments have them; see
  // DealtColumn of kernels/quantize_int4.h. The wide kernel takes x so, and only it gives y so.
  bool x_dealt = false;
  bool y_dealt = false;

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

enum class ExpertKernel { kSimt, kStream, kRing, kTile, kWide };

// A kernel, and how many slots a tile has at most.
struct ExpertPlan {
  ExpertKernel kernel = ExpertKernel::kSimt;
  int tile_slots = 0;
};

inline constexpr int kSimtSlots = 16;
inline constexpr int kStreamSlotsFew = 8;
inline constexpr int kStreamSlots = 16;
inline constexpr int kRingSlotsFew = 8;
inline constexpr int kRingSlots = 16;
inline constexpr int kTileSlotsFew = 32;
inline constexpr int kTileSlots = 64;
inline constexpr int kWideSlots = 128;
// Of what numbers of rows the ring and the wide kernel take multiples: half as many of gate and up.
inline constexpr int kRingRows = 128;
inline constexpr int kWideRows = 256;

// What of a product decides which kernels can take it.
struct ExpertMatrix {
  ExpertWeights weights = ExpertWeights::kBf16;
  int rows = 0;
  int cols = 0;
  bool gated = false;  // Two such matrices, gate and up
};

// Whether a kernel takes such matrices at all; but simt all take bf16 values only.
constexpr bool TakesMatrix(ExpertKernel kernel, const ExpertMatrix& matrix) {
  const int rows = matrix.gated ? 2 * matrix.rows : matrix.rows;
  const bool groups = matrix.weights == ExpertWeights::kInt4 && matrix.cols % kInt4GroupCols == 0;
  switch (kernel) {
    case ExpertKernel::kSimt:
      return true;
    case ExpertKernel::kStream:
    case ExpertKernel::kTile:
      return matrix.weights != ExpertWeights::kF32;
    case ExpertKernel::kRing:
      return groups && rows % kRingRows == 0;
    case ExpertKernel::kWide:
      return groups && rows % kWideRows == 0;
  }
  return false;
}

// And whether it does on this GPU, as this program was built.
bool CanRun(ExpertKernel kernel, const ExpertMatrix& matrix);

// The kernel for so many pairs an expert on average, of bf16 values; `ring` and `wide`: which of
// the two can run. The bounds are where the kernels' times cross on an H200 (bench_cuda_dense).
struct ExpertPlanInput {
  ExpertWeights weights = ExpertWeights::kBf16;
  double pairs_per_expert = 0;
  bool ring = false;
  bool wide = false;
};
constexpr ExpertPlan PlanExpertGemm(const ExpertPlanInput& input) {
  const double pairs = input.pairs_per_expert;
  if (pairs > 12 && input.wide) return {ExpertKernel::kWide, kWideSlots};
  const bool few = pairs <= (input.weights == ExpertWeights::kInt4 ? 8 : 1);
  if (pairs <= 14 && input.ring) {
    return {ExpertKernel::kRing, few ? kRingSlotsFew : kRingSlots};
  }
  if (pairs <= 14) return {ExpertKernel::kStream, few ? kStreamSlotsFew : kStreamSlots};
  return {ExpertKernel::kTile, pairs <= 40 ? kTileSlotsFew : kTileSlots};
}

// x and y of `type`. kF32 weights go with kF32 values, kBf16 with kBf16, kInt4 with either.
cudaError_t LaunchExpertGemm(cudaStream_t stream, ValueType type, const ExpertPlan& plan,
                             const ExpertGemmArgs& args);

// Whether the program holds code for them.
bool RingIsBuilt();
bool WideIsBuilt();

// x [rows, cols] in bf16 to rows of dealt columns; cols is a multiple of 32, and both lie on 16
// bytes.
cudaError_t LaunchDealColumns(cudaStream_t stream, const void* x, int64_t rows, int64_t cols,
                              void* to);

// The single kernels; `tile_slots` is one of those that bear the kernel's name.
cudaError_t LaunchExpertGemmSimt(cudaStream_t stream, ValueType type, const ExpertGemmArgs& args);
cudaError_t LaunchExpertGemmStream(cudaStream_t stream, int tile_slots, const ExpertGemmArgs& args);
cudaError_t LaunchExpertGemmRing(cudaStream_t stream, int tile_slots, const ExpertGemmArgs& args);
cudaError_t LaunchExpertGemmTile(cudaStream_t stream, int tile_slots, const ExpertGemmArgs& args);
cudaError_t LaunchExpertGemmWide(cudaStream_t stream, const ExpertGemmArgs& args);

}  // namespace writescope::kernels
