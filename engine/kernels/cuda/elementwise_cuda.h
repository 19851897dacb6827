// Launches of the small row operations on the GPU; the contracts are those of
// kernels/elementwise.h. Arrays are device memory unless it says mapped: page-locked host memory
// that kernels read or write where it lies.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "engine/kernels/cuda/value_type.h"
#include "engine/kernels/elementwise.h"

namespace writescope::kernels {

// to[i] = from[rows[i]], rows of `row_bytes` (even), from_stride_bytes from one to the next. `rows`
// may be mapped.
cudaError_t LaunchGatherRows(cudaStream_t stream, int num_rows, int64_t row_bytes,
                             int64_t from_stride_bytes, const int32_t* rows, const void* from,
                             void* to);

// out = (x / rms(x)) * weight for rows of `dim`.
cudaError_t LaunchRmsNorm(cudaStream_t stream, ValueType type, int num_rows, int dim, const void* x,
                          const float* weight, float eps, void* out);

// out[i] = silu(gate[i]) * up[i]; out may be either input.
cudaError_t LaunchSwiGlu(cudaStream_t stream, ValueType type, int64_t count, const void* gate,
                         const void* up, void* out);

// to[i] = MaxOfRow of row i of `dim` values. `to` may be mapped.
cudaError_t LaunchMaxOfRows(cudaStream_t stream, ValueType type, int num_rows, int dim,
                            const void* x, RowMax* to);

// to[i] = float(from[i]); `to` may be mapped.
cudaError_t LaunchToFloats(cudaStream_t stream, ValueType type, int64_t count, const void* from,
                           float* to);

// Values to mapped memory, as `type`, unless *failed is not 0; then, in any case, *ready = value.
struct PublishCall {
  ValueType type = ValueType::kF32;
  int64_t count = 0;
  const float* from = nullptr;  // Aligned to 16 bytes, like `to`
  void* to = nullptr;
  const uint32_t* failed = nullptr;
  uint32_t* counter = nullptr;  // 0 before and after
  uint64_t* ready = nullptr;    // Mapped
  uint64_t value = 0;
  // Mapped; null, or the device's time when all before was done, and when the values were there.
  uint64_t* began_ns = nullptr;
  uint64_t* ended_ns = nullptr;
};
cudaError_t LaunchPublish(cudaStream_t stream, const PublishCall& call);

}  // namespace writescope::kernels
