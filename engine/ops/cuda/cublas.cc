#include "engine/ops/cuda/cublas.h"

#include <dlfcn.h>

#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"

namespace writescope::ops {
namespace {

// Found at run time, so that the same program starts where there is no CUDA and serves on the CPU
// device there.
struct CublasCalls {
  decltype(&cublasCreate_v2) create = nullptr;
  decltype(&cublasDestroy_v2) destroy = nullptr;
  decltype(&cublasSetStream_v2) set_stream = nullptr;
  decltype(&cublasSetWorkspace_v2) set_workspace = nullptr;
  decltype(&cublasSetMathMode) set_math_mode = nullptr;
  // Written out, since the header overloads their names.
  cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                         const void*, const void*, cudaDataType, int, const void*, cudaDataType,
                         int, const void*, void*, cudaDataType, int, cublasComputeType_t,
                         cublasGemmAlgo_t) = nullptr;
  cublasStatus_t (*gemm_batched)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int,
                                 int, const void*, const void*, cudaDataType, int, long long,
                                 const void*, cudaDataType, int, long long, const void*, void*,
                                 cudaDataType, int, long long, int, cublasComputeType_t,
                                 cublasGemmAlgo_t) = nullptr;
  std::string error;  // Empty when all are there
};

CublasCalls LoadCublas() {
  CublasCalls calls;
  const std::string name = absl::StrCat("libcublas.so.", CUBLAS_VER_MAJOR);
  void* library = nullptr;
  for (const std::string& folder : {std::string(), std::string("/usr/local/cuda/lib64/")}) {
    library = dlopen((folder + name).c_str(), RTLD_NOW);
    if (library != nullptr) break;
  }
  if (library == nullptr) {
    calls.error = absl::StrCat(name, " cannot be loaded (", dlerror(),
                               "); it is part of the CUDA toolkit: put its folder into "
                               "LD_LIBRARY_PATH");
    return calls;
  }
  const auto find = [&](const char* symbol, auto* call) {
    *call = reinterpret_cast<std::remove_pointer_t<decltype(call)>>(dlsym(library, symbol));
    if (*call == nullptr) calls.error = absl::StrCat(name, " has no ", symbol);
  };
  find("cublasCreate_v2", &calls.create);
  find("cublasDestroy_v2", &calls.destroy);
  find("cublasSetStream_v2", &calls.set_stream);
  find("cublasSetWorkspace_v2", &calls.set_workspace);
  find("cublasSetMathMode", &calls.set_math_mode);
  find("cublasGemmEx", &calls.gemm);
  find("cublasGemmStridedBatchedEx", &calls.gemm_batched);
  return calls;
}

const CublasCalls& Calls() {
  static const CublasCalls calls = LoadCublas();
  return calls;
}

absl::Status CublasStatus(cublasStatus_t status, absl::string_view what) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": cuBLAS status ", static_cast<int>(status)));
}

cudaDataType_t TypeOf(kernels::ValueType type) {
  return type == kernels::ValueType::kF32 ? CUDA_R_32F : CUDA_R_16BF;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Cublas>> Cublas::Create(cudaStream_t stream, std::byte* workspace) {
  if (!Calls().error.empty()) return absl::FailedPreconditionError(Calls().error);
  cublasHandle_t handle = nullptr;
  RETURN_IF_ERROR(CublasStatus(Calls().create(&handle), "cublasCreate"));
  std::unique_ptr<Cublas> cublas(new Cublas(handle));
  cublas->workspace_ = workspace;
  RETURN_IF_ERROR(cublas->UseStream(stream));
  // No tf32 unless asked for, and parts of a sum are added in float32.
  RETURN_IF_ERROR(CublasStatus(
      Calls().set_math_mode(
          handle, static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH |
                                            CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)),
      "cublasSetMathMode"));
  return cublas;
}

absl::Status Cublas::UseStream(cudaStream_t stream) {
  // Setting the stream drops the workspace, so it comes first.
  RETURN_IF_ERROR(CublasStatus(Calls().set_stream(handle_, stream), "cublasSetStream"));
  return CublasStatus(Calls().set_workspace(handle_, workspace_, kWorkspaceBytes),
                      "cublasSetWorkspace");
}

Cublas::~Cublas() { Calls().destroy(handle_); }

absl::Status Cublas::Multiply(const BlasProduct& p) {
  const cublasComputeType_t compute =
      p.type == kernels::ValueType::kF32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F;
  const cudaDataType_t type = TypeOf(p.type);
  // cuBLAS counts by columns: our y is its y^T = W * x^T, with W given as its transpose.
  const int m = static_cast<int>(p.rows), n = static_cast<int>(p.num_rows);
  const int k = static_cast<int>(p.cols);
  const int ldw = static_cast<int>(p.w_stride), ldx = static_cast<int>(p.x_stride);
  const int ldy = static_cast<int>(p.y_stride);
  const cublasOperation_t w_op = p.w_is_turned ? CUBLAS_OP_N : CUBLAS_OP_T;
  const cublasStatus_t status =
      p.batch == 1
          ? Calls().gemm(handle_, w_op, CUBLAS_OP_N, m, n, k, &p.alpha, p.w, type, ldw, p.x, type,
                         ldx, &p.beta, p.y, TypeOf(p.y_type), ldy, compute, CUBLAS_GEMM_DEFAULT)
          : Calls().gemm_batched(handle_, w_op, CUBLAS_OP_N, m, n, k, &p.alpha, p.w, type, ldw,
                                 p.w_batch, p.x, type, ldx, p.x_batch, &p.beta, p.y,
                                 TypeOf(p.y_type), ldy, p.y_batch, p.batch, compute,
                                 CUBLAS_GEMM_DEFAULT);
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return CublasStatus(status, absl::StrCat(p.batch, " products of ", p.num_rows,
                                           " rows with a matrix of ", p.rows, " x ", p.cols));
}

}  // namespace writescope::ops
