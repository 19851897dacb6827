// Many slots to an expert. A block multiplies 128 rows of weights (64 of gate, 64 of up) by 32 or
// 64 slots; a warp 32 rows by 32 slots. Steps of the columns come through a ring in shared memory
// by asynchronous copies; 4-bit weights stay packed until they are in registers.
#include "engine/kernels/cuda/async_copy.h"
#include "engine/kernels/cuda/expert_gemm.h"
#include "engine/kernels/cuda/launch.h"
#include "engine/kernels/cuda/tensor_core.h"
#include "engine/kernels/cuda/values.h"
#include "engine/kernels/quantize_int4.h"

namespace writescope::kernels {
namespace {

constexpr int kWarpRows = 4;              // Warps along the rows
constexpr int kRowTiles = kWarpRows * 2;  // With a gate the second of each warp's two is of `up`.
constexpr int kStages = 3;

// kSlots: of a tile.
template <ExpertWeights kWeights, int kSlots>
struct TileShape {
  static constexpr int kThreads = kWarpRows * (kSlots / 32) * 32;
  static constexpr bool kInt4 = kWeights == ExpertWeights::kInt4;
  static constexpr int kStep = kInt4 ? kInt4GroupCols : 64;
  static constexpr int kChunks = kStep / 8;  // 16 bytes of values, of a row
  static constexpr int kWeightBytes =
      kInt4 ? kRowTiles * kInt4GroupWords * 4 : kRowTiles * 16 * kStep * 2;
  static constexpr int kStageBytes = kWeightBytes + kSlots * kStep * 2;
};

// Byte of a chunk of a row. Lanes that read at once, of two neighbouring rows, meet all banks.
template <int kChunks>
__device__ int ChunkByte(int row, int chunk) {
  return (row * kChunks + (chunk ^ (row & 1) << 2)) * 16;
}

// The row tile of W that is `tile` of the block; gate and up alternate.
template <bool kGated>
__device__ int RowTile(int tile) {
  return kGated ? blockIdx.x * (kRowTiles / 2) + tile / 2 : blockIdx.x * kRowTiles + tile;
}

template <typename Shape, bool kGated>
__device__ void CopyWeights(const ExpertGemmArgs& args, int64_t expert_bytes, int step,
                            std::byte* to) {
  constexpr int kThreads = Shape::kThreads;
  constexpr int kPieces = Shape::kWeightBytes / 16;
  static_assert(kPieces % kThreads == 0);
#pragma unroll
  for (int j = 0; j < kPieces / kThreads; ++j) {
    const int i = threadIdx.x + j * kThreads;
    if constexpr (Shape::kInt4) {
      constexpr int kTilePieces = kInt4GroupWords / 4;
      const int tile = i / kTilePieces;
      const std::byte* w = (kGated && tile % 2 == 1 ? args.up : args.w) + expert_bytes;
      const int64_t row_tile =
          min(RowTile<kGated>(tile), static_cast<int>(Int4RowTiles(args.rows)) - 1);
      const int64_t block = row_tile * Int4Groups(args.cols) + step;
      CopyAsync16(SharedAddress(to + i * 16),
                  w + block * (kInt4GroupWords * 4) + i % kTilePieces * 16);
    } else {
      const int tile_row = i / Shape::kChunks, chunk = i % Shape::kChunks;
      const int tile = tile_row / 16;
      const std::byte* w = (kGated && tile % 2 == 1 ? args.up : args.w) + expert_bytes;
      const int64_t row = min(RowTile<kGated>(tile) * 16 + tile_row % 16, args.rows - 1);
      const int col = step * Shape::kStep + chunk * 8;
      const bool inside = col < args.cols;
      CopyAsync16(SharedAddress(to + ChunkByte<Shape::kChunks>(tile_row, chunk)),
                  w + (row * Bf16Stride(args.cols) + (inside ? col : 0)) * 2, inside);
    }
  }
}

template <typename Shape>
__device__ void CopyValues(const ExpertGemmArgs& args, const int* x_rows, bool aligned, int step,
                           std::byte* to) {
  constexpr int kThreads = Shape::kThreads;
  constexpr int kPieces = (Shape::kStageBytes - Shape::kWeightBytes) / 16;
  static_assert(kPieces % kThreads == 0);
#pragma unroll
  for (int j = 0; j < kPieces / kThreads; ++j) {
    const int i = threadIdx.x + j * kThreads;
    const int slot = i / Shape::kChunks, chunk = i % Shape::kChunks;
    const int col = step * Shape::kStep + chunk * 8;
    const __nv_bfloat16* row =
        static_cast<const __nv_bfloat16*>(args.x) + max(x_rows[slot], 0) * args.x_stride;
    std::byte* at = to + ChunkByte<Shape::kChunks>(slot, chunk);
    if (aligned) {
      const bool inside = x_rows[slot] >= 0 && col < args.cols;
      CopyAsync16(SharedAddress(at), row + (inside ? col : 0), inside);
    } else {
      *reinterpret_cast<uint4*>(at) =
          LoadValues(x_rows[slot] < 0 ? nullptr : row, col, args.cols, false);
    }
  }
}

// One step: sums of the warp's two row tiles by its four times eight slots.
template <typename Shape>
__device__ void MultiplyStage(const std::byte* w, const std::byte* x, int warp_row, int warp_slot,
                              int lane, float (&sums)[2][4][4]) {
#pragma unroll
  for (int b = 0; b < Shape::kStep / 32; ++b) {
    uint4 values[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int slot = warp_slot * 32 + n * 8 + lane / 4;
      values[n] =
          *reinterpret_cast<const uint4*>(x + ChunkByte<Shape::kChunks>(slot, 4 * b + lane % 4));
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      uint32_t first[4], second[4];
      if constexpr (Shape::kInt4) {
        const uint2 bits =
            *reinterpret_cast<const uint2*>(w + (warp_row * 2 + m) * (kInt4GroupWords * 4) +
                                            b / 2 * (kInt4GroupWords * 2) + lane * 16 + b % 2 * 8);
        UnpackInt4(bits.x, first);
        UnpackInt4(bits.y, second);
      } else {
        const int row = (warp_row * 2 + m) * 16 + lane / 4;
        const uint4 low =
            *reinterpret_cast<const uint4*>(w + ChunkByte<Shape::kChunks>(row, 4 * b + lane % 4));
        const uint4 high = *reinterpret_cast<const uint4*>(
            w + ChunkByte<Shape::kChunks>(row + 8, 4 * b + lane % 4));
        first[0] = low.x, first[1] = high.x, first[2] = low.y, first[3] = high.y;
        second[0] = low.z, second[1] = high.z, second[2] = low.w, second[3] = high.w;
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        Mma(first, values[n].x, values[n].y, sums[m][n]);
        Mma(second, values[n].z, values[n].w, sums[m][n]);
      }
    }
  }
}

template <ExpertWeights kWeights, bool kGated, int kSlots>
__global__ void __launch_bounds__(TileShape<kWeights, kSlots>::kThreads)
    ExpertGemmTileKernel(ExpertGemmArgs args) {
  using Shape = TileShape<kWeights, kSlots>;
  constexpr int kThreads = Shape::kThreads;
  extern __shared__ __align__(128) std::byte stages[];
  __shared__ int x_rows[kSlots], y_rows[kSlots];  // -1 past the last slot
  WaitForKernelBefore();
  LetNextKernelBegin();
  const ExpertTile tile = args.tiles[blockIdx.y];
  if (tile.num_slots == 0) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % kWarpRows, warp_slot = warp / kWarpRows;
  const int64_t expert_bytes = tile.expert * args.expert_stride_bytes;
  if (threadIdx.x < kSlots) {
    const int slot = threadIdx.x, at = tile.first_slot + slot;
    const bool inside = slot < tile.num_slots;
    const int pair = inside ? args.slot_pairs[at] : 0;
    x_rows[slot] = !inside ? -1 : args.x_by_token ? pair / args.experts_per_token : at;
    y_rows[slot] = !inside ? -1 : args.y_by_pair ? pair : at;
  }
  __syncthreads();

  const bool aligned =
      args.cols % 8 == 0 && args.x_stride % 8 == 0 && reinterpret_cast<uintptr_t>(args.x) % 16 == 0;
  const int num_steps = (args.cols + Shape::kStep - 1) / Shape::kStep;
  const auto copy_step = [&](int step) {
    if (step < num_steps) {
      std::byte* stage = stages + step % kStages * Shape::kStageBytes;
      CopyWeights<Shape, kGated>(args, expert_bytes, step, stage);
      CopyValues<Shape>(args, x_rows, aligned, step, stage + Shape::kWeightBytes);
    }
    CommitCopies();
  };
  const std::byte* scales[2] = {};
  if constexpr (Shape::kInt4) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const std::byte* w = (kGated && m == 1 ? args.up : args.w) + expert_bytes;
      const int64_t row_tile =
          min(RowTile<kGated>(warp_row * 2 + m), static_cast<int>(Int4RowTiles(args.rows)) - 1);
      scales[m] = w + Int4QuantBytes(args.rows, args.cols) +
                  row_tile * Int4Groups(args.cols) * (kInt4TileRows * 2) + lane / 4 * 4;
    }
  }

  float sums[2][4][4] = {};
  for (int step = 0; step < kStages - 1; ++step) copy_step(step);
  for (int step = 0; step < num_steps; ++step) {
    WaitCopies<kStages - 2>();
    __syncthreads();  // The step is there, and everybody is done with the one before.
    copy_step(step + kStages - 1);
    const std::byte* w = stages + step % kStages * Shape::kStageBytes;
    const std::byte* x = w + Shape::kWeightBytes;
    if constexpr (Shape::kInt4) {
      uint32_t scale[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        scale[m] = __ldg(reinterpret_cast<const uint32_t*>(scales[m] + step * (kInt4TileRows * 2)));
      }
      float group[2][4][4] = {};
      MultiplyStage<Shape>(w, x, warp_row, warp_slot, lane, group);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            sums[m][n][c] += (c < 2 ? LowBf16(scale[m]) : HighBf16(scale[m])) * group[m][n][c];
          }
        }
      }
    } else {
      MultiplyStage<Shape>(w, x, warp_row, warp_slot, lane, sums);
    }
  }

  // Through shared memory, so that rows of y are written as whole lines.
  WaitCopies<0>();
  __syncthreads();
  constexpr int kOutRows = kGated ? kRowTiles * 8 : kRowTiles * 16;
  constexpr int kOutStride = kOutRows + 8;
  auto* out = reinterpret_cast<__nv_bfloat16*>(stages);  // [kSlots][kOutStride]
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int slot = warp_slot * 32 + n * 8 + lane % 4 * 2 + c % 2;
      const int row = lane / 4 + c / 2 * 8;
      __nv_bfloat16* to = out + slot * kOutStride;
      if constexpr (kGated) {
        to[warp_row * 16 + row] = __float2bfloat16_rn(SiLu(sums[0][n][c]) * sums[1][n][c]);
      } else {
        to[warp_row * 32 + row] = __float2bfloat16_rn(sums[0][n][c]);
        to[warp_row * 32 + 16 + row] = __float2bfloat16_rn(sums[1][n][c]);
      }
    }
  }
  __syncthreads();
  const int first_row = blockIdx.x * kOutRows;
  const bool whole = args.y_stride % 8 == 0 && args.rows % 8 == 0;
  for (int i = threadIdx.x; i < tile.num_slots * (kOutRows / 8); i += kThreads) {
    const int slot = i / (kOutRows / 8), r = i % (kOutRows / 8) * 8;
    const __nv_bfloat16* from = out + slot * kOutStride + r;
    __nv_bfloat16* to =
        static_cast<__nv_bfloat16*>(args.y) + y_rows[slot] * args.y_stride + first_row + r;
    if (whole) {
      if (first_row + r < args.rows) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      }
    } else {
      for (int j = 0; j < 8 && first_row + r + j < args.rows; ++j) to[j] = from[j];
    }
  }
}

template <ExpertWeights kWeights, bool kGated, int kSlots>
cudaError_t Launch(cudaStream_t stream, const ExpertGemmArgs& args) {
  using Shape = TileShape<kWeights, kSlots>;
  constexpr int kOutRows = kGated ? kRowTiles * 8 : kRowTiles * 16;
  constexpr int kSharedBytes = kStages * Shape::kStageBytes;
  static_assert(kSlots * (kRowTiles * 16 + 8) * 2 <= kSharedBytes);
  static const cudaError_t error =
      cudaFuncSetAttribute(ExpertGemmTileKernel<kWeights, kGated, kSlots>,
                           cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid((args.rows + kOutRows - 1) / kOutRows, args.num_tiles);
  return LaunchEarly(stream, &ExpertGemmTileKernel<kWeights, kGated, kSlots>, grid, Shape::kThreads,
                     kSharedBytes, args);
}

template <ExpertWeights kWeights>
cudaError_t LaunchFor(cudaStream_t stream, int tile_slots, const ExpertGemmArgs& args) {
  if (tile_slots == kTileSlotsFew) {
    return args.up != nullptr ? Launch<kWeights, true, kTileSlotsFew>(stream, args)
                              : Launch<kWeights, false, kTileSlotsFew>(stream, args);
  }
  return args.up != nullptr ? Launch<kWeights, true, kTileSlots>(stream, args)
                            : Launch<kWeights, false, kTileSlots>(stream, args);
}

}  // namespace

cudaError_t LaunchExpertGemmTile(cudaStream_t stream, int tile_slots, const ExpertGemmArgs& args) {
  return args.weights == ExpertWeights::kInt4
             ? LaunchFor<ExpertWeights::kInt4>(stream, tile_slots, args)
             : LaunchFor<ExpertWeights::kBf16>(stream, tile_slots, args);
}

}  // namespace writescope::kernels
