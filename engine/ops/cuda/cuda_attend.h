// Attention over tiles on the GPU: the running states of rows, the blocks of a call, and the merge
// with the CPU's partials.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "engine/device/cuda/cuda_device.h"
#include "engine/ops/cuda/compute_type.h"
#include "engine/ops/ops.h"

namespace writescope::ops {

// Engine thread. The contracts of the calls are those of Ops (ops.h). For the same calls on the
// same GPU the results are the same in every bit, whatever runs beside.
class CudaAttend {
 public:
  // Of device memory, for the partial results of work that is divided along the keys.
  static int64_t WorkspaceBytes(const OpsLimits& limits);
  // With `force_simt` no tensor-core instruction is used, as on GPUs before sm_80. Tensor cores
  // take q and the weights rounded to bf16; there are kernels for bf16 keys of 32, 64, 96, 128 and
  // 192/128 values, and for latents of 576/512 where a thread block can have 226 KiB of shared
  // memory (H100, H200). Everything else is taken in float32 by the plain kernel.
  static absl::StatusOr<std::unique_ptr<CudaAttend>> Create(device::CudaDevice& device,
                                                            const OpsLimits& limits,
                                                            ComputeType compute, bool force_simt);
  virtual ~CudaAttend() = default;

  virtual void Reset(int num_rows, int num_heads, int v_dim, const AttendState& state) = 0;
  virtual void Attend(const AttendArgs& args) = 0;
  virtual void Merge(const MergeArgs& args) = 0;
  // Touches every kernel that `args` like these can need, so that none is loaded while serving.
  virtual void WarmUp(const KvGeometry& geometry, int num_heads) = 0;
};

}  // namespace writescope::ops
