// Attention over tiles on the GPU: the running states of rows, the blocks of a call, and the merge
// with the CPU's partials.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "absl/status/statusor.h"
#include "engine/device/cuda/cuda_device.h"
#include "engine/kernels/cuda/attend_work.h"
#include "engine/ops/cuda/compute_type.h"
#include "engine/ops/cuda/latent_heads.h"
#include "engine/ops/ops.h"

namespace writescope::ops {

// A plan for every layer of a step. It goes to device memory as it is: sizes, then arrays.
struct StagedPlan {
  kernels::SliceSizes sizes;
  std::span<const std::byte> arrays;  // Until the next call
};

// A layer of a staged step.
struct StagedAttend {
  KvGeometry kv;
  int num_heads = 0;
  int num_rows = 0;                           // One of each reader
  const kernels::SliceSizes* plan = nullptr;  // Device
  int layer = 0;
  const float* q = nullptr;
  int out_dim = 0;
  void* out = nullptr;
};

// Engine thread. The contracts of the calls are those of Ops (ops.h). For the same calls on the
// same GPU the results are the same in every bit, whatever runs beside.
class CudaAttend {
 public:
  // Of device memory, for the partial results of work that is divided along the keys and for keys
  // and values as operands.
  static int64_t WorkspaceBytes(const OpsLimits& limits);
  // With `force_simt` no tensor-core instruction is used, as on GPUs before sm_80. Tensor cores
  // take q and the weights rounded to bf16; there are kernels for bf16 keys of 32, 64, 96, 128 and
  // 192/128 values, and for latents of 576/512 where a thread block can have 226 KiB of shared
  // memory (H100, H200). Everything else is taken in float32 by the plain kernel. Prompts with
  // heads of 128 values, and heads of 192/128 that are made of latents, are attended to by
  // warpgroup products on compute capability 9.0.
  static absl::StatusOr<std::unique_ptr<CudaAttend>> Create(device::CudaDevice& device,
                                                            const OpsLimits& limits,
                                                            ComputeType compute, bool force_simt);
  virtual ~CudaAttend() = default;

  virtual void Reset(int num_rows, int num_heads, const AttendState& state) = 0;
  virtual void Attend(const AttendArgs& args) = 0;
  // The same with AttendState::heads, where it takes them.
  virtual bool TakesHeads(const KvGeometry& kv, const LatentHeads& heads) const = 0;
  virtual void AttendHeads(const AttendArgs& args, const LatentProducts& products) = 0;
  virtual void Merge(const MergeArgs& args) = 0;
  // The plan of a step of one row to each reader, every one of which sees something: of at most
  // `max_bytes` of arrays. None where that is too little, or the work takes several passes.
  virtual std::optional<StagedPlan> Stage(const AttendArgs& args, int64_t max_bytes) = 0;
  // Reset, Attend and Merge in one, by the plan. Its launches depend on the layer and num_rows
  // only.
  virtual void AttendStaged(const StagedAttend& args) = 0;
  // Touches every kernel that `args` like these can need, so that none is loaded while serving.
  virtual void WarmUp(const KvGeometry& geometry, int num_heads) = 0;
  virtual void WarmUpHeads(const KvGeometry& kv, const LatentHeads& heads,
                           const LatentProducts& products) = 0;
};

}  // namespace writescope::ops
