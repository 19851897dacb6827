// Which device and operations the options ask for: the one place in the runtime that knows the
// kinds there are.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/device/device.h"
#include "engine/ops/ops.h"
#include "engine/runtime/engine.h"

namespace writescope::runtime {

// UNIMPLEMENTED, with what to use instead, for a device or a combination this build does not have.
absl::Status CheckAccelerator(const EngineOptions& options);

// What operations take, and bytes of the budget that are gone before the first allocation. Needs no
// device.
ops::OpsFootprint AcceleratorFootprint(const EngineOptions& options);
int64_t DeviceReserveBytes(const EngineOptions& options);

// Of options in which every default is filled in.
absl::StatusOr<std::unique_ptr<device::Device>> CreateDevice(const EngineOptions& options);
absl::StatusOr<std::unique_ptr<ops::Ops>> CreateOps(device::Device& device,
                                                    const ops::OpsLimits& limits,
                                                    const EngineOptions& options);

}  // namespace writescope::runtime
