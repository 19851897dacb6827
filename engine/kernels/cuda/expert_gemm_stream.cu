// Few slots to an expert. The warps of a block divide its columns (and, where columns are few, its
// rows): each streams its part of the weights through registers, with the next step's loads in
// flight while it multiplies. Their sums are added in shared memory at the end; nothing else waits
// for anything.
#include "engine/kernels/cuda/expert_gemm.h"
#include "engine/kernels/cuda/launch.h"
#include "engine/kernels/cuda/tensor_core.h"
#include "engine/kernels/cuda/values.h"
#include "engine/kernels/quantize_int4.h"

namespace writescope::kernels {
namespace {

constexpr int kWarps = 4;

template <ExpertWeights kWeights>
struct StreamShape;
// Row tiles of a block (with a gate half of them are of `up`), and columns of a step: 128 bytes of
// a row, or a group.
template <>
struct StreamShape<ExpertWeights::kBf16> {
  static constexpr int kRowTiles = 2, kStep = 64, kLoads = 4;
};
template <>
struct StreamShape<ExpertWeights::kInt4> {
  static constexpr int kRowTiles = 4, kStep = kInt4GroupCols, kLoads = 2;
};

// What a lane holds of one step.
template <ExpertWeights kWeights>
struct WeightStep {
  using Shape = StreamShape<kWeights>;
  uint4 w[Shape::kRowTiles][Shape::kLoads];
  uint32_t scales[Shape::kRowTiles];
};
template <ExpertWeights kWeights, int kSlotTiles>
struct ValueStep {
  uint4 x[kSlotTiles][StreamShape<kWeights>::kStep / 32];
};

template <ExpertWeights kWeights>
struct StreamWeights {
  using Shape = StreamShape<kWeights>;
  const std::byte* rows[Shape::kRowTiles];  // bf16: of row g. int4: of the lane in the first group.
  const std::byte* scales[Shape::kRowTiles];
  int64_t rows_apart_bytes[Shape::kRowTiles];  // bf16: from row g to g + 8.
};

template <ExpertWeights kWeights>
__device__ void LocateTile(const ExpertGemmArgs& args, const std::byte* w, int row_tile, int lane,
                           int m, StreamWeights<kWeights>* to) {
  if constexpr (kWeights == ExpertWeights::kInt4) {
    const int64_t tile = min(row_tile, static_cast<int>(Int4RowTiles(args.rows)) - 1);
    const int64_t block = tile * Int4Groups(args.cols);
    to->rows[m] = w + block * (kInt4GroupWords * 4) + lane * 16;
    to->scales[m] =
        w + Int4QuantBytes(args.rows, args.cols) + block * (kInt4TileRows * 2) + lane / 4 * 4;
  } else {
    // Rows past the end repeat the last; nobody reads their sums.
    const int64_t row_bytes = Bf16Stride(args.cols) * 2;
    const int row = min(row_tile * 16 + lane / 4, args.rows - 1);
    const int row8 = min(row_tile * 16 + lane / 4 + 8, args.rows - 1);
    to->rows[m] = w + row * row_bytes + lane % 4 * 16;
    to->rows_apart_bytes[m] = (row8 - row) * row_bytes;
  }
}

template <ExpertWeights kWeights>
__device__ void LoadWeightStep(const ExpertGemmArgs& args, const StreamWeights<kWeights>& weights,
                               int step, int lane, WeightStep<kWeights>* to) {
  using Shape = StreamShape<kWeights>;
#pragma unroll
  for (int m = 0; m < Shape::kRowTiles; ++m) {
    if constexpr (kWeights == ExpertWeights::kInt4) {
      const std::byte* at = weights.rows[m] + static_cast<int64_t>(step) * (kInt4GroupWords * 4);
      to->w[m][0] = LoadOnce(at);
      to->w[m][1] = LoadOnce(at + kInt4GroupWords * 2);
      to->scales[m] = __ldg(reinterpret_cast<const uint32_t*>(
          weights.scales[m] + static_cast<int64_t>(step) * (kInt4TileRows * 2)));
    } else {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int col = step * Shape::kStep + 32 * b;
        const bool inside = col + lane % 4 * 8 < args.cols;
        const std::byte* at = weights.rows[m] + col * 2;
        to->w[m][2 * b] = inside ? LoadOnce(at) : make_uint4(0, 0, 0, 0);
        to->w[m][2 * b + 1] =
            inside ? LoadOnce(at + weights.rows_apart_bytes[m]) : make_uint4(0, 0, 0, 0);
      }
    }
  }
}

template <ExpertWeights kWeights, int kSlotTiles>
__device__ void LoadValueStep(const ExpertGemmArgs& args,
                              const __nv_bfloat16* const (&x_rows)[kSlotTiles], bool aligned,
                              int step, int lane, ValueStep<kWeights, kSlotTiles>* to) {
  using Shape = StreamShape<kWeights>;
#pragma unroll
  for (int n = 0; n < kSlotTiles; ++n) {
#pragma unroll
    for (int b = 0; b < Shape::kStep / 32; ++b) {
      to->x[n][b] =
          LoadValues(x_rows[n], step * Shape::kStep + 32 * b + lane % 4 * 8, args.cols, aligned);
    }
  }
}

template <ExpertWeights kWeights, int kSlotTiles>
__device__ void MultiplyStep(const WeightStep<kWeights>& step,
                             const ValueStep<kWeights, kSlotTiles>& values,
                             float (&sums)[StreamShape<kWeights>::kRowTiles][kSlotTiles][4]) {
  using Shape = StreamShape<kWeights>;
#pragma unroll
  for (int m = 0; m < Shape::kRowTiles; ++m) {
    if constexpr (kWeights == ExpertWeights::kInt4) {
      float group[kSlotTiles][4] = {};
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const uint4& bits = step.w[m][b / 2];
        uint32_t a[4];
        UnpackInt4(b % 2 == 0 ? bits.x : bits.z, a);
#pragma unroll
        for (int n = 0; n < kSlotTiles; ++n) Mma(a, values.x[n][b].x, values.x[n][b].y, group[n]);
        UnpackInt4(b % 2 == 0 ? bits.y : bits.w, a);
#pragma unroll
        for (int n = 0; n < kSlotTiles; ++n) Mma(a, values.x[n][b].z, values.x[n][b].w, group[n]);
      }
      const float low = LowBf16(step.scales[m]), high = HighBf16(step.scales[m]);
#pragma unroll
      for (int n = 0; n < kSlotTiles; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[m][n][c] += (c < 2 ? low : high) * group[n][c];
      }
    } else {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const uint4& low = step.w[m][2 * b];
        const uint4& high = step.w[m][2 * b + 1];
        const uint32_t first[4] = {low.x, high.x, low.y, high.y};
        const uint32_t second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int n = 0; n < kSlotTiles; ++n) {
          Mma(first, values.x[n][b].x, values.x[n][b].y, sums[m][n]);
          Mma(second, values.x[n][b].z, values.x[n][b].w, sums[m][n]);
        }
      }
    }
  }
}

// `col_parts` warps divide the columns; the block has kWarps / col_parts times the rows of a warp.
template <ExpertWeights kWeights, bool kGated, int kSlotTiles>
__global__ void __launch_bounds__(kWarps * 32)
    ExpertGemmStreamKernel(ExpertGemmArgs args, int col_parts) {
  using Shape = StreamShape<kWeights>;
  constexpr int kRowTiles = Shape::kRowTiles;
  constexpr int kSumRows = kRowTiles * 16;
  constexpr int kOutRows = kGated ? kSumRows / 2 : kSumRows;
  constexpr int kSlots = kSlotTiles * 8;
  // The padding sends the four columns that a warp writes at once to different banks.
  __shared__ float warp_sums[kWarps][kSlots][kSumRows + 4];
  if (!args.tiles_settled) WaitForKernelBefore();
  const ExpertTile tile = args.tiles[blockIdx.y];
  if (tile.num_slots == 0) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_block_row = blockIdx.x * (kWarps / col_parts) * kOutRows;
  const int first_row = first_block_row + warp / col_parts * kOutRows;

  StreamWeights<kWeights> weights;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const bool is_up = kGated && m >= kRowTiles / 2;
    const std::byte* w = (is_up ? args.up : args.w) + tile.expert * args.expert_stride_bytes;
    LocateTile<kWeights>(args, w, first_row / 16 + (is_up ? m - kRowTiles / 2 : m), lane, m,
                         &weights);
  }
  // The first weights are on their way before it is known which values they meet.
  const int num_steps = (args.cols + Shape::kStep - 1) / Shape::kStep;
  int step = warp % col_parts;
  WeightStep<kWeights> now, next;
  if (step < num_steps) LoadWeightStep<kWeights>(args, weights, step, lane, &now);
  if (args.tiles_settled) WaitForKernelBefore();
  LetNextKernelBegin();

  const bool aligned =
      args.cols % 8 == 0 && args.x_stride % 8 == 0 && reinterpret_cast<uintptr_t>(args.x) % 16 == 0;
  const __nv_bfloat16* x_rows[kSlotTiles];
#pragma unroll
  for (int n = 0; n < kSlotTiles; ++n) {
    const int slot = n * 8 + lane / 4;
    x_rows[n] = nullptr;
    if (slot < tile.num_slots) {
      const int at = tile.first_slot + slot;
      const int64_t row = args.x_by_token ? args.slot_pairs[at] / args.experts_per_token : at;
      x_rows[n] = static_cast<const __nv_bfloat16*>(args.x) + row * args.x_stride;
    }
  }

  float sums[kRowTiles][kSlotTiles][4] = {};
  ValueStep<kWeights, kSlotTiles> values, next_values;
  const auto load_values = [&](int at, ValueStep<kWeights, kSlotTiles>* to) {
    LoadValueStep<kWeights, kSlotTiles>(args, x_rows, aligned, at, lane, to);
  };
  if (step < num_steps) load_values(step, &values);
  for (; step < num_steps; step += col_parts) {
    if (step + col_parts < num_steps) {
      LoadWeightStep<kWeights>(args, weights, step + col_parts, lane, &next);
      load_values(step + col_parts, &next_values);
    }
    MultiplyStep<kWeights, kSlotTiles>(now, values, sums);
    now = next;
    values = next_values;
  }

#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kSlotTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        warp_sums[warp][n * 8 + lane % 4 * 2 + c % 2][m * 16 + lane / 4 + c / 2 * 8] =
            sums[m][n][c];
      }
    }
  }
  __syncthreads();
  const int block_rows = kWarps / col_parts * kOutRows;
  for (int i = threadIdx.x; i < tile.num_slots * block_rows; i += kWarps * 32) {
    const int slot = i / block_rows, block_row = i % block_rows;
    if (first_block_row + block_row >= args.rows) continue;
    const int first_warp = block_row / kOutRows * col_parts, r = block_row % kOutRows;
    float value = 0, up = 0;
    for (int w = first_warp; w < first_warp + col_parts; ++w) {
      value += warp_sums[w][slot][r];
      if constexpr (kGated) up += warp_sums[w][slot][kOutRows + r];
    }
    if constexpr (kGated) value = SiLu(value) * up;
    const int at = tile.first_slot + slot;
    const int64_t row = args.y_by_pair ? args.slot_pairs[at] : at;
    static_cast<__nv_bfloat16*>(args.y)[row * args.y_stride + first_block_row + block_row] =
        __float2bfloat16_rn(value);
  }
}

// How many warps divide the columns. With two the others take further rows, and values are read
// once for twice the weights, which tells where weights are of 4 bits; but it needs enough blocks.
// On an H200 (bench_cuda_dense) two took 5 to 15 % less time than four from 1,200 blocks of four
// on, and 20 to 40 % more below 1,000.
template <ExpertWeights kWeights>
int ColParts(int row_blocks_of_four, int num_tiles) {
  constexpr int64_t kBlocksMin = 1100;
  const bool two =
      kWeights == ExpertWeights::kInt4 && int64_t{row_blocks_of_four} * num_tiles >= kBlocksMin;
  return two ? kWarps / 2 : kWarps;
}

template <ExpertWeights kWeights, int kSlotTiles>
cudaError_t Launch(cudaStream_t stream, const ExpertGemmArgs& args) {
  using Shape = StreamShape<kWeights>;
  const bool gated = args.up != nullptr;
  const int warp_rows = Shape::kRowTiles * 16 / (gated ? 2 : 1);
  const int col_parts = ColParts<kWeights>((args.rows + warp_rows - 1) / warp_rows, args.num_tiles);
  const int rows = kWarps / col_parts * warp_rows;
  const dim3 grid((args.rows + rows - 1) / rows, args.num_tiles);
  const auto kernel = gated ? &ExpertGemmStreamKernel<kWeights, true, kSlotTiles>
                            : &ExpertGemmStreamKernel<kWeights, false, kSlotTiles>;
  return LaunchEarly(stream, kernel, grid, kWarps * 32, 0, args, col_parts);
}

}  // namespace

cudaError_t LaunchExpertGemmStream(cudaStream_t stream, int tile_slots,
                                   const ExpertGemmArgs& args) {
  const bool int4 = args.weights == ExpertWeights::kInt4;
  if (tile_slots == kStreamSlotsFew) {
    return int4 ? Launch<ExpertWeights::kInt4, kStreamSlotsFew / 8>(stream, args)
                : Launch<ExpertWeights::kBf16, kStreamSlotsFew / 8>(stream, args);
  }
  return int4 ? Launch<ExpertWeights::kInt4, kStreamSlots / 8>(stream, args)
              : Launch<ExpertWeights::kBf16, kStreamSlots / 8>(stream, args);
}

}  // namespace writescope::kernels
