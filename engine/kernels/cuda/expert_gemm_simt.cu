#include "engine/kernels/cuda/expert_gemm.h"
#include "engine/kernels/cuda/values.h"
#include "engine/kernels/quantize_int4.h"

namespace writescope::kernels {
namespace {

constexpr int kRows = 64;  // Of W, in a block
constexpr int kStep = 32;  // Columns that are in shared memory at a time
constexpr int kThreads = 256;
constexpr int kRowsPerThread = kRows * kSimtSlots / kThreads;

// One value of a matrix; zero outside.
template <ExpertWeights kWeights>
__device__ float WeightAt(const std::byte* w, int rows, int cols, int row, int col) {
  if (row >= rows || col >= cols) return 0;
  if constexpr (kWeights == ExpertWeights::kF32) {
    return reinterpret_cast<const float*>(w)[static_cast<int64_t>(row) * cols + col];
  } else if constexpr (kWeights == ExpertWeights::kBf16) {
    return ToFloat(reinterpret_cast<const __nv_bfloat16*>(w)[row * Bf16Stride(cols) + col]);
  } else {
    // The inverse of Int4Row and Int4Col.
    const int in_tile = row % kInt4TileRows, in_group = col % kInt4GroupCols;
    const int lane = in_tile % 8 * 4 + in_group % 32 / 8;
    const int step = in_group % 64 / 32 * 2 + in_group % 8 / 4;
    const int word = (in_group / 64 * 32 + lane) * 4 + step;
    const int nibble = in_tile / 8 + (in_group & 2) + (in_group & 1) * 4;
    const int64_t block = row / kInt4TileRows * Int4Groups(cols) + col / kInt4GroupCols;
    const uint32_t bits = reinterpret_cast<const uint32_t*>(w)[block * kInt4GroupWords + word];
    const float scale = ToFloat(reinterpret_cast<const __nv_bfloat16*>(
        w + Int4QuantBytes(rows, cols))[block * kInt4TileRows + Int4ScaleIndex(in_tile)]);
    return static_cast<float>(static_cast<int>(bits >> (4 * nibble) & 0xf) - kInt4Bias) * scale;
  }
}

// A block takes kRows rows of W and the slots of a tile; a thread one slot and every 16th row.
template <typename T, ExpertWeights kWeights>
__global__ void __launch_bounds__(kThreads) ExpertGemmSimtKernel(ExpertGemmArgs args) {
  __shared__ float x_step[kSimtSlots][kStep + 1];
  __shared__ float w_step[2][kRows][kStep + 1];
  const ExpertTile tile = args.tiles[blockIdx.y];
  if (tile.num_slots == 0) return;
  const bool gated = args.up != nullptr;
  const std::byte* w = args.w + tile.expert * args.expert_stride_bytes;
  const std::byte* up = args.up + tile.expert * args.expert_stride_bytes;
  const int first_row = blockIdx.x * kRows;
  const int slot = threadIdx.x / 16;  // Of the tile
  float sums[2][kRowsPerThread] = {};
  for (int first_col = 0; first_col < args.cols; first_col += kStep) {
    for (int i = threadIdx.x; i < kSimtSlots * kStep; i += kThreads) {
      const int s = i / kStep, col = first_col + i % kStep;
      float value = 0;
      if (s < tile.num_slots && col < args.cols) {
        const int at = tile.first_slot + s;
        const int64_t row = args.x_by_token ? args.slot_pairs[at] / args.experts_per_token : at;
        value = ToFloat(static_cast<const T*>(args.x)[row * args.x_stride + col]);
      }
      x_step[s][i % kStep] = value;
    }
    for (int i = threadIdx.x; i < kRows * kStep; i += kThreads) {
      const int row = first_row + i / kStep, col = first_col + i % kStep;
      w_step[0][i / kStep][i % kStep] = WeightAt<kWeights>(w, args.rows, args.cols, row, col);
      if (gated) {
        w_step[1][i / kStep][i % kStep] = WeightAt<kWeights>(up, args.rows, args.cols, row, col);
      }
    }
    __syncthreads();
    for (int c = 0; c < kStep; ++c) {
      const float x = x_step[slot][c];
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) {
        const int row = threadIdx.x % 16 + 16 * r;
        sums[0][r] += w_step[0][row][c] * x;
        if (gated) sums[1][r] += w_step[1][row][c] * x;
      }
    }
    __syncthreads();
  }
  if (slot >= tile.num_slots) return;
  const int at = tile.first_slot + slot;
  T* y = static_cast<T*>(args.y) + (args.y_by_pair ? args.slot_pairs[at] : at) * args.y_stride;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const int row = first_row + threadIdx.x % 16 + 16 * r;
    if (row < args.rows) y[row] = FromFloat<T>(gated ? SiLu(sums[0][r]) * sums[1][r] : sums[0][r]);
  }
}

}  // namespace

cudaError_t LaunchExpertGemmSimt(cudaStream_t stream, ValueType type, const ExpertGemmArgs& args) {
  const dim3 grid((args.rows + kRows - 1) / kRows, args.num_tiles);
  const bool int4 = args.weights == ExpertWeights::kInt4;
  if (type == ValueType::kF32) {
    const auto kernel = int4 ? &ExpertGemmSimtKernel<float, ExpertWeights::kInt4>
                             : &ExpertGemmSimtKernel<float, ExpertWeights::kF32>;
    kernel<<<grid, kThreads, 0, stream>>>(args);
  } else {
    const auto kernel = int4 ? &ExpertGemmSimtKernel<__nv_bfloat16, ExpertWeights::kInt4>
                             : &ExpertGemmSimtKernel<__nv_bfloat16, ExpertWeights::kBf16>;
    kernel<<<grid, kThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace writescope::kernels
