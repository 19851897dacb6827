// Ops on a CUDA GPU: cuBLAS for dense products, our kernels for the rest, everything on the compute
// stream.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/device/cuda/cuda_device.h"
#include "engine/ops/cuda/compute_type.h"
#include "engine/ops/ops.h"

namespace writescope::ops {

struct CudaOpsOptions {
  ComputeType compute = ComputeType::kBf16;
  // No tensor-core instruction of ours, as on GPUs before sm_80. (cuBLAS chooses for itself.)
  bool force_simt = false;
};

// What CreateCudaOps takes: the workspace counts that of attention and of cuBLAS.
OpsFootprint CudaOpsFootprint(ComputeType compute);

// What CreateCudaOps asks of a model and a step first; it needs no GPU. Unimplemented for a model
// that the kernels do not take.
absl::Status CheckCudaOpsLimits(const OpsLimits& limits);

// `device` must outlive the result.
absl::StatusOr<std::unique_ptr<Ops>> CreateCudaOps(device::CudaDevice& device,
                                                   const OpsLimits& limits,
                                                   const CudaOpsOptions& options);

}  // namespace writescope::ops
