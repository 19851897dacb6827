// Launch of a dense product of few rows: the weights set the time, and a library's kernels for
// large sizes take twice as long or more.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "engine/kernels/cuda/value_type.h"

namespace writescope::kernels {

inline constexpr int kSmallProductRows = 16;
inline constexpr int kSmallProductBatch = 65535;

// Whether LaunchSmallProduct is the faster: on an H200 (bench_cuda_dense) it takes 2.5 us for
// cuBLAS's 5.8 at 512 x 2048 and 6.2 for 8.0 at 4096 x 2048. Beyond 16 M values many blocks hide
// what one waits for, and above 8 rows the second tile of x costs more than it gains unless W is
// small.
constexpr bool IsSmallProduct(int64_t num_rows, int64_t rows, int64_t cols, int64_t batch) {
  return num_rows <= kSmallProductRows && batch <= kSmallProductBatch &&
         batch * rows * cols <= (num_rows <= 8 ? 1 << 24 : 1 << 21);
}

// y (+)= alpha * x * W^T in bf16 into float32, `batch` products evenly spaced; sm_80 and later.
struct SmallProductArgs {
  int num_rows = 0;  // Of x and y; at most kSmallProductRows
  int rows = 0;      // Of W
  int cols = 0;
  const void* x = nullptr;
  int64_t x_stride = 0;
  const std::byte* w = nullptr;  // [rows, w_stride], w_stride a multiple of 8
  int64_t w_stride = 0;
  ValueType y_type = ValueType::kBf16;
  void* y = nullptr;
  int64_t y_stride = 0;
  float alpha = 1;
  bool accumulate = false;
  int batch = 1;
  int64_t x_batch = 0, w_batch = 0, y_batch = 0;  // In values
};

cudaError_t LaunchSmallProduct(cudaStream_t stream, const SmallProductArgs& args);

// The two kernels that it chooses between, with the same results to the bit. `Plain` takes
// anything; `Ring`, on sm_90, brings a large matrix by bulk copies for up to 8 rows.
cudaError_t LaunchSmallProductPlain(cudaStream_t stream, const SmallProductArgs& args);
bool RunsSmallProductRing(const SmallProductArgs& args);
cudaError_t LaunchSmallProductRing(cudaStream_t stream, const SmallProductArgs& args);

}  // namespace writescope::kernels
