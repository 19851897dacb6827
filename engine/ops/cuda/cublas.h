// One cuBLAS handle on one stream, and the products that we ask of it.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/kernels/cuda/value_type.h"

namespace writescope::ops {

// y = alpha * x * W^T + beta * y, row-major; `batch` products, evenly spaced. x and W are of one
// type. float32 multiplies in float32, bf16 into float32.
struct BlasProduct {
  int64_t num_rows = 0;  // Of x and y
  int64_t rows = 0;      // Of W
  int64_t cols = 0;
  bool w_is_turned = false;  // W is given as [cols, rows].
  kernels::ValueType type = kernels::ValueType::kBf16;
  const void* x = nullptr;
  int64_t x_stride = 0;
  const void* w = nullptr;
  int64_t w_stride = 0;
  kernels::ValueType y_type = kernels::ValueType::kBf16;
  void* y = nullptr;
  int64_t y_stride = 0;
  float alpha = 1;
  float beta = 0;
  int batch = 1;
  int64_t x_batch = 0, w_batch = 0, y_batch = 0;  // In values
};

// Submits to its stream, from one thread. The same calls give the same bits.
class Cublas {
 public:
  static constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

  // `workspace` is kWorkspaceBytes of device memory, all that products take while running.
  static absl::StatusOr<std::unique_ptr<Cublas>> Create(cudaStream_t stream, std::byte* workspace);
  // Products go to `stream` from here on.
  absl::Status UseStream(cudaStream_t stream);
  ~Cublas();
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  absl::Status Multiply(const BlasProduct& product);

 private:
  explicit Cublas(cublasHandle_t handle) : handle_(handle) {}
  cublasHandle_t handle_;
  std::byte* workspace_ = nullptr;
};

}  // namespace writescope::ops
