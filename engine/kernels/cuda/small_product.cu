#include "engine/kernels/cuda/launch.h"
#include "engine/kernels/cuda/small_product.h"
#include "engine/kernels/cuda/tensor_core.h"
#include "engine/kernels/cuda/values.h"

namespace writescope::kernels {
namespace {

constexpr int kWarps = 16;  // Divide the columns.
constexpr int kRows = 16;   // Of W, in a block
constexpr int kStep = 64;   // Columns at a time: 128 bytes of each row

// What a lane holds of a step: rows g and g + 8 of W, in two parts of 32 columns.
struct WeightStep {
  uint4 low[2], high[2];
};

template <int kSlotTiles>
__global__ void __launch_bounds__(kWarps * 32, 2) SmallProductKernel(SmallProductArgs args) {
  // The padding sends the four columns that a warp writes at once to different banks.
  __shared__ float warp_sums[kWarps][kSlotTiles * 8][kRows + 4];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_row = blockIdx.x * kRows;
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
  WeightStep now, next;
  int col = warp * kStep;
  if (col < args.cols) load_weights(col, &now);
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
  float sums[kSlotTiles][4] = {};
  for (; col < args.cols; col += kWarps * kStep) {
    uint4 x[kSlotTiles][2];
#pragma unroll
    for (int n = 0; n < kSlotTiles; ++n) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        x[n][b] = LoadValues(x_rows[n], col + 32 * b + lane % 4 * 8, args.cols, aligned);
      }
    }
    if (col + kWarps * kStep < args.cols) load_weights(col + kWarps * kStep, &next);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const uint32_t first[4] = {now.low[b].x, now.high[b].x, now.low[b].y, now.high[b].y};
      const uint32_t second[4] = {now.low[b].z, now.high[b].z, now.low[b].w, now.high[b].w};
#pragma unroll
      for (int n = 0; n < kSlotTiles; ++n) {
        Mma(first, x[n][b].x, x[n][b].y, sums[n]);
        Mma(second, x[n][b].z, x[n][b].w, sums[n]);
      }
    }
    now = next;
  }
#pragma unroll
  for (int n = 0; n < kSlotTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      warp_sums[warp][n * 8 + lane % 4 * 2 + c % 2][lane / 4 + c / 2 * 8] = sums[n][c];
    }
  }
  __syncthreads();
  const int slot = threadIdx.x / kRows, r = threadIdx.x % kRows;
  if (slot >= args.num_rows || first_row + r >= args.rows) return;
  float value = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) value += warp_sums[w][slot][r];
  const int64_t at = slot * args.y_stride + first_row + r;
  if (args.y_type == ValueType::kF32) {
    float* y = static_cast<float*>(args.y) + at;
    *y = args.accumulate ? *y + value : value;
  } else {
    __nv_bfloat16* y = static_cast<__nv_bfloat16*>(args.y) + at;
    *y = __float2bfloat16_rn(args.accumulate ? ToFloat(*y) + value : value);
  }
}

}  // namespace

cudaError_t LaunchSmallProduct(cudaStream_t stream, const SmallProductArgs& args) {
  const auto kernel = args.num_rows <= 8 ? &SmallProductKernel<1> : &SmallProductKernel<2>;
  return LaunchEarly(stream, kernel, (args.rows + kRows - 1) / kRows, kWarps * 32, 0, args);
}

}  // namespace writescope::kernels
