#include "engine/runtime/accelerator.h"

#include <utility>

#include "engine/base/status_macros.h"
#include "engine/base/units.h"
#include "engine/device/cpu/cpu_device.h"
#include "engine/ops/cpu_ops.h"

#if WRITESCOPE_WITH_CUDA
#include "engine/device/cuda/cuda_device.h"
#include "engine/ops/cuda/cuda_ops.h"
#endif

namespace writescope::runtime {
namespace {

#if WRITESCOPE_WITH_CUDA
// The context, its modules and cuBLAS, and the rounding of allocations to whole units of 2 MiB.
constexpr int64_t kCudaReserveBytes = 1 * kGiB;

ops::ComputeType ComputeTypeOf(const EngineOptions& options) {
  return options.compute_dtype == ComputeDtype::kF32 ? ops::ComputeType::kF32
                                                     : ops::ComputeType::kBf16;
}

device::FlagWaits FlagWaitsOf(const EngineOptions& options) {
  switch (options.device_waits) {
    case DeviceWaits::kAuto:
      return device::FlagWaits::kAuto;
    case DeviceWaits::kDevice:
      return device::FlagWaits::kStream;
    case DeviceWaits::kHost:
      return device::FlagWaits::kCaller;
  }
  return device::FlagWaits::kAuto;
}
#endif

}  // namespace

absl::Status CheckAccelerator(const EngineOptions& options) {
  if (options.device == DeviceKind::kCpu) {
    if (options.compute_dtype == ComputeDtype::kBf16) {
      return absl::UnimplementedError(
          "the CPU device computes in float32; bf16 needs --device=cuda");
    }
    return absl::OkStatus();
  }
#if WRITESCOPE_WITH_CUDA
  if (options.weights == WeightsFormat::kInt4 && options.compute_dtype == ComputeDtype::kF32) {
    return absl::UnimplementedError(
        "int4 weights are multiplied in bf16; use --compute-dtype=bf16");
  }
  return absl::OkStatus();
#else
  return absl::UnimplementedError(
      "this build has no CUDA device, since it was made without a CUDA toolkit; use --device=cpu");
#endif
}

ops::OpsFootprint AcceleratorFootprint(const EngineOptions& options) {
#if WRITESCOPE_WITH_CUDA
  if (options.device == DeviceKind::kCuda) return ops::CudaOpsFootprint(ComputeTypeOf(options));
#endif
  static_cast<void>(options);
  return ops::CpuOpsFootprint();
}

int64_t DeviceReserveBytes(const EngineOptions& options) {
#if WRITESCOPE_WITH_CUDA
  if (options.device == DeviceKind::kCuda) return kCudaReserveBytes;
#endif
  static_cast<void>(options);
  return 0;
}

absl::StatusOr<std::unique_ptr<device::Device>> CreateDevice(const EngineOptions& options) {
  RETURN_IF_ERROR(CheckAccelerator(options));
#if WRITESCOPE_WITH_CUDA
  if (options.device == DeviceKind::kCuda) {
    return device::CudaDevice::Create({.ordinal = options.device_ordinal,
                                       .budget_bytes = options.vram_budget_bytes,
                                       .host_budget_bytes = options.host_budget_bytes,
                                       .allow_pageable = options.allow_pageable,
                                       .flag_waits = FlagWaitsOf(options)});
  }
#endif
  return device::CpuDevice::Create({.budget_bytes = options.vram_budget_bytes,
                                    .host_budget_bytes = options.host_budget_bytes,
                                    .compute_threads = options.device_threads,
                                    .link_bytes_per_s = options.link_bytes_per_s});
}

absl::StatusOr<std::unique_ptr<ops::Ops>> CreateOps(device::Device& device,
                                                    const ops::OpsLimits& limits,
                                                    const EngineOptions& options) {
#if WRITESCOPE_WITH_CUDA
  if (options.device == DeviceKind::kCuda) {
    return ops::CreateCudaOps(
        static_cast<device::CudaDevice&>(device), limits,
        {.compute = ComputeTypeOf(options), .force_simt = options.force_simt});
  }
#endif
  static_cast<void>(options);
  return ops::CreateCpuOps(static_cast<device::CpuDevice&>(device), limits);
}

}  // namespace writescope::runtime
