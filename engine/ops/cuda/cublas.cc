#include "engine/ops/cuda/cublas.h"

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"

namespace writescope::ops {
namespace {

absl::Status CublasStatus(cublasStatus_t status, absl::string_view what) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", cublasGetStatusString(status)));
}

cudaDataType_t TypeOf(kernels::ValueType type) {
  return type == kernels::ValueType::kF32 ? CUDA_R_32F : CUDA_R_16BF;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Cublas>> Cublas::Create(cudaStream_t stream, std::byte* workspace) {
  cublasHandle_t handle = nullptr;
  RETURN_IF_ERROR(CublasStatus(cublasCreate(&handle), "cublasCreate"));
  std::unique_ptr<Cublas> cublas(new Cublas(handle));
  // Setting the stream drops the workspace, so it comes first.
  RETURN_IF_ERROR(CublasStatus(cublasSetStream(handle, stream), "cublasSetStream"));
  RETURN_IF_ERROR(
      CublasStatus(cublasSetWorkspace(handle, workspace, kWorkspaceBytes), "cublasSetWorkspace"));
  // No tf32 unless asked for, and parts of a sum are added in float32.
  RETURN_IF_ERROR(CublasStatus(
      cublasSetMathMode(
          handle, static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH |
                                            CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)),
      "cublasSetMathMode"));
  return cublas;
}

Cublas::~Cublas() { cublasDestroy(handle_); }

absl::Status Cublas::Multiply(const BlasProduct& p) {
  const cublasComputeType_t compute =
      p.type == kernels::ValueType::kF32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F;
  const cudaDataType_t type = TypeOf(p.type);
  // cuBLAS counts by columns: our y is its y^T = W * x^T, with W given as its transpose.
  const int m = static_cast<int>(p.rows), n = static_cast<int>(p.num_rows);
  const int k = static_cast<int>(p.cols);
  const int ldw = static_cast<int>(p.w_stride), ldx = static_cast<int>(p.x_stride);
  const int ldy = static_cast<int>(p.y_stride);
  if (p.batch == 1) {
    return CublasStatus(
        cublasGemmEx(handle_, CUBLAS_OP_T, CUBLAS_OP_N, m, n, k, &p.alpha, p.w, type, ldw, p.x,
                     type, ldx, &p.beta, p.y, TypeOf(p.y_type), ldy, compute, CUBLAS_GEMM_DEFAULT),
        "cublasGemmEx");
  }
  return CublasStatus(cublasGemmStridedBatchedEx(
                          handle_, CUBLAS_OP_T, CUBLAS_OP_N, m, n, k, &p.alpha, p.w, type, ldw,
                          p.w_batch, p.x, type, ldx, p.x_batch, &p.beta, p.y, TypeOf(p.y_type), ldy,
                          p.y_batch, p.batch, compute, CUBLAS_GEMM_DEFAULT),
                      "cublasGemmStridedBatchedEx");
}

}  // namespace writescope::ops
