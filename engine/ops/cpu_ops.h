// Ops on the CPU device: kernels of engine/kernels on the compute queue's team of threads.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "engine/device/cpu/cpu_device.h"
#include "engine/ops/ops.h"

namespace writescope::ops {

// Bytes of device memory that CreateCpuOps takes for its workspace.
int64_t CpuOpsWorkspaceBytes(const OpsLimits& limits);

OpsFootprint CpuOpsFootprint();

// `device` must outlive the result.
absl::StatusOr<std::unique_ptr<Ops>> CreateCpuOps(device::CpuDevice& device,
                                                  const OpsLimits& limits);

}  // namespace writescope::ops
