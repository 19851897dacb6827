// Few slots to an expert. Each warp takes every fourth step of the columns and streams its part of
// the weights through registers, with the next step's loads in flight while it multiplies; the
// warps' sums are added in shared memory at the end. Nothing else waits for anything.
#include "engine/kernels/cuda/expert_gemm.h"
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
template <ExpertWeights kWeights, int kSlotTiles>
struct StreamStep {
  using Shape = StreamShape<kWeights>;
  uint4 w[Shape::kRowTiles][Shape::kLoads];
  uint32_t scales[Shape::kRowTiles];
  uint4 x[kSlotTiles][Shape::kStep / 32];
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

template <ExpertWeights kWeights, int kSlotTiles>
__device__ void LoadStep(const ExpertGemmArgs& args, const StreamWeights<kWeights>& weights,
                         const __nv_bfloat16* const (&x_rows)[kSlotTiles], bool aligned, int step,
                         int lane, StreamStep<kWeights, kSlotTiles>* to) {
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
__device__ void MultiplyStep(const StreamStep<kWeights, kSlotTiles>& step,
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
        for (int n = 0; n < kSlotTiles; ++n) Mma(a, step.x[n][b].x, step.x[n][b].y, group[n]);
        UnpackInt4(b % 2 == 0 ? bits.y : bits.w, a);
#pragma unroll
        for (int n = 0; n < kSlotTiles; ++n) Mma(a, step.x[n][b].z, step.x[n][b].w, group[n]);
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
          Mma(first, step.x[n][b].x, step.x[n][b].y, sums[m][n]);
          Mma(second, step.x[n][b].z, step.x[n][b].w, sums[m][n]);
        }
      }
    }
  }
}

template <ExpertWeights kWeights, bool kGated, int kSlotTiles>
__global__ void __launch_bounds__(kWarps * 32) ExpertGemmStreamKernel(ExpertGemmArgs args) {
  using Shape = StreamShape<kWeights>;
  constexpr int kRowTiles = Shape::kRowTiles;
  constexpr int kSumRows = kRowTiles * 16;
  constexpr int kOutRows = kGated ? kSumRows / 2 : kSumRows;
  constexpr int kSlots = kSlotTiles * 8;
  // The padding sends the four columns that a warp writes at once to different banks.
  __shared__ float warp_sums[kWarps][kSlots][kSumRows + 4];
  const ExpertTile tile = args.tiles[blockIdx.y];
  if (tile.num_slots == 0) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_row = blockIdx.x * kOutRows;

  StreamWeights<kWeights> weights;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const bool is_up = kGated && m >= kRowTiles / 2;
    const std::byte* w = (is_up ? args.up : args.w) + tile.expert * args.expert_stride_bytes;
    LocateTile<kWeights>(args, w, first_row / 16 + (is_up ? m - kRowTiles / 2 : m), lane, m,
                         &weights);
  }
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
  const int num_steps = (args.cols + Shape::kStep - 1) / Shape::kStep;
  StreamStep<kWeights, kSlotTiles> now, next;
  int step = warp;
  if (step < num_steps) {
    LoadStep<kWeights, kSlotTiles>(args, weights, x_rows, aligned, step, lane, &now);
  }
  while (step < num_steps) {
    const int following = step + kWarps;
    if (following < num_steps) {
      LoadStep<kWeights, kSlotTiles>(args, weights, x_rows, aligned, following, lane, &next);
    }
    MultiplyStep<kWeights, kSlotTiles>(now, sums);
    now = next;
    step = following;
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
  for (int i = threadIdx.x; i < tile.num_slots * kOutRows; i += kWarps * 32) {
    const int slot = i / kOutRows, r = i % kOutRows;
    if (first_row + r >= args.rows) continue;
    float value = 0, up = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      value += warp_sums[w][slot][r];
      if constexpr (kGated) up += warp_sums[w][slot][kOutRows + r];
    }
    if constexpr (kGated) value = SiLu(value) * up;
    const int at = tile.first_slot + slot;
    const int64_t row = args.y_by_pair ? args.slot_pairs[at] : at;
    static_cast<__nv_bfloat16*>(args.y)[row * args.y_stride + first_row + r] =
        __float2bfloat16_rn(value);
  }
}

template <ExpertWeights kWeights, int kSlotTiles>
void Launch(cudaStream_t stream, const ExpertGemmArgs& args) {
  constexpr int kSumRows = StreamShape<kWeights>::kRowTiles * 16;
  const bool gated = args.up != nullptr;
  const int rows = gated ? kSumRows / 2 : kSumRows;
  const dim3 grid((args.rows + rows - 1) / rows, args.num_tiles);
  const auto kernel = gated ? &ExpertGemmStreamKernel<kWeights, true, kSlotTiles>
                            : &ExpertGemmStreamKernel<kWeights, false, kSlotTiles>;
  kernel<<<grid, kWarps * 32, 0, stream>>>(args);
}

}  // namespace

cudaError_t LaunchExpertGemmStream(cudaStream_t stream, int tile_slots,
                                   const ExpertGemmArgs& args) {
  const bool int4 = args.weights == ExpertWeights::kInt4;
  if (tile_slots == kStreamSlotsFew) {
    int4 ? Launch<ExpertWeights::kInt4, kStreamSlotsFew / 8>(stream, args)
         : Launch<ExpertWeights::kBf16, kStreamSlotsFew / 8>(stream, args);
  } else {
    int4 ? Launch<ExpertWeights::kInt4, kStreamSlots / 8>(stream, args)
         : Launch<ExpertWeights::kBf16, kStreamSlots / 8>(stream, args);
  }
  return cudaGetLastError();
}

}  // namespace writescope::kernels
