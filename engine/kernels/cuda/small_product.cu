#include "engine/kernels/cuda/launch.h"
#include "engine/kernels/cuda/small_product.h"
#include "engine/kernels/cuda/small_product_device.h"
#include "engine/kernels/cuda/tensor_core.h"
#include "engine/kernels/cuda/values.h"

namespace writescope::kernels {
namespace {

constexpr int kManyWarps = 16;  // Of a block; they divide the columns.
constexpr int kFewWarps = 4;    // Where columns are few
constexpr int kRows = 16;       // Of W, in a block
constexpr int kStep = 64;       // Columns at a time: 128 bytes of each row

// What a lane holds of a step: rows g and g + 8 of W, in two parts of 32 columns.
struct WeightStep {
  uint4 low[2], high[2];
};

template <int kSlotTiles>
struct ValueStep {
  uint4 x[kSlotTiles][2];
};

template <int kSlotTiles, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, (kSlotTiles == 1 ? 2 : 1) * kManyWarps / kWarps)
    SmallProductKernel(SmallProductArgs args) {
  // The padding sends the four columns that a warp writes at once to different banks.
  __shared__ float warp_sums[kWarps][kSlotTiles * 8][kRows + 4];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_row = blockIdx.x * kRows;
  args.w += blockIdx.y * args.w_batch * 2;
  args.x = static_cast<const __nv_bfloat16*>(args.x) + blockIdx.y * args.x_batch;
  // Rows past the end repeat the last; nobody reads their sums.
  const auto row_of = [&](int row) {
    return args.w + (min(first_row + row, args.rows - 1) * args.w_stride + lane % 4 * 8) * 2;
  };
  const std::byte* low = row_of(lane / 4);
  const std::byte* high = row_of(lane / 4 + 8);
  const auto load_weights = [&](int col, WeightStep* to) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const bool inside = col + 32 * b + lane % 4 * 8 < args.cols;
      to->low[b] = inside ? LoadOnce(low + (col + 32 * b) * 2) : make_uint4(0, 0, 0, 0);
      to->high[b] = inside ? LoadOnce(high + (col + 32 * b) * 2) : make_uint4(0, 0, 0, 0);
    }
  };
  // The first weights come while the kernel before is still at work on x.
  constexpr int kBlockStep = kWarps * kStep;
  WeightStep weights[2];
  int col = warp * kStep;
  if (col < args.cols) load_weights(col, &weights[0]);
  if (col + kBlockStep < args.cols) load_weights(col + kBlockStep, &weights[1]);
  WaitForKernelBefore();
  LetNextKernelBegin();

  const bool aligned =
      args.cols % 8 == 0 && args.x_stride % 8 == 0 && reinterpret_cast<uintptr_t>(args.x) % 16 == 0;
  const __nv_bfloat16* x_rows[kSlotTiles];
#pragma unroll
  for (int n = 0; n < kSlotTiles; ++n) {
    const int row = n * 8 + lane / 4;
    x_rows[n] = row < args.num_rows
                    ? static_cast<const __nv_bfloat16*>(args.x) + row * args.x_stride
                    : nullptr;
  }
  const auto load_values = [&](int at, ValueStep<kSlotTiles>* to) {
#pragma unroll
    for (int n = 0; n < kSlotTiles; ++n) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        to->x[n][b] = LoadValues(x_rows[n], at + 32 * b + lane % 4 * 8, args.cols, aligned);
      }
    }
  };
  float sums[kSlotTiles][4] = {};
  const auto multiply = [&](const WeightStep& w, const ValueStep<kSlotTiles>& values) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const uint32_t first[4] = {w.low[b].x, w.high[b].x, w.low[b].y, w.high[b].y};
      const uint32_t second[4] = {w.low[b].z, w.high[b].z, w.low[b].w, w.high[b].w};
#pragma unroll
      for (int n = 0; n < kSlotTiles; ++n) {
        Mma(first, values.x[n][b].x, values.x[n][b].y, sums[n]);
        Mma(second, values.x[n][b].z, values.x[n][b].w, sums[n]);
      }
    }
  };
  // Two steps at a time, the weights of the next two on their way; and the values of both, where
  // there are registers for them.
  constexpr bool kBothValues = kSlotTiles == 1;
  for (; col < args.cols; col += 2 * kBlockStep) {
    ValueStep<kSlotTiles> values[kBothValues ? 2 : 1];
    load_values(col, &values[0]);
    if constexpr (kBothValues) load_values(col + kBlockStep, &values[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = col + i * kBlockStep;
      if (at >= args.cols) break;
      if (!kBothValues && i == 1) load_values(at, &values[0]);
      multiply(weights[i], values[kBothValues ? i : 0]);
      if (at + 2 * kBlockStep < args.cols) load_weights(at + 2 * kBlockStep, &weights[i]);
    }
  }
#pragma unroll
  for (int n = 0; n < kSlotTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      warp_sums[warp][n * 8 + lane % 4 * 2 + c % 2][lane / 4 + c / 2 * 8] = sums[n][c];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < args.num_rows * kRows; i += kWarps * 32) {
    const int slot = i / kRows, r = i % kRows;
    if (first_row + r >= args.rows) continue;
    float value = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) value += warp_sums[w][slot][r];
    const int64_t at = blockIdx.y * args.y_batch + slot * args.y_stride + first_row + r;
    StoreProduct(args, at, value, ValueBefore(args, at));
  }
}

template <int kWarps>
cudaError_t Launch(cudaStream_t stream, const SmallProductArgs& args) {
  const auto kernel =
      args.num_rows <= 8 ? &SmallProductKernel<1, kWarps> : &SmallProductKernel<2, kWarps>;
  const dim3 grid((args.rows + kRows - 1) / kRows, args.batch);
  return LaunchEarly(stream, kernel, grid, kWarps * 32, 0, args);
}

}  // namespace

cudaError_t LaunchSmallProductPlain(cudaStream_t stream, const SmallProductArgs& args) {
  return args.cols <= kFewWarps * kStep ? Launch<kFewWarps>(stream, args)
                                        : Launch<kManyWarps>(stream, args);
}

cudaError_t LaunchSmallProduct(cudaStream_t stream, const SmallProductArgs& args) {
  // Of the sizes that were measured, those where it is the faster. Behind the shared experts of
  // DeepSeek-V2-Lite, 2048 x 2816, all experts in bf16 took a third longer on an H200 with it:
  // presumably since it takes all shared memory, so that the kernel that begins beside it has
  // little of the first cache.
  constexpr int64_t kRingValues = int64_t{1} << 23;
  return int64_t{args.rows} * args.cols >= kRingValues && RunsSmallProductRing(args)
             ? LaunchSmallProductRing(stream, args)
             : LaunchSmallProductPlain(stream, args);
}

}  // namespace writescope::kernels
