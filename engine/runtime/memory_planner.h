// Turns options and a model into sizes, before anything is allocated.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "engine/model/config.h"
#include "engine/ops/ops.h"
#include "engine/runtime/engine.h"
#include "engine/runtime/model_runner.h"

namespace writescope::runtime {

// A plan together with the sizes that Create works with.
struct SizedPlan {
  MemoryPlan plan;
  EngineOptions options;  // Every 0 that stands for a default is filled in.
  ModelRunner::Options runner;
  int64_t weight_bytes = 0;
};

// Checks the options that do not need a model. INVALID_ARGUMENT names the option.
absl::Status ValidateOptions(const EngineOptions& options);

// RESOURCE_EXHAUSTED, with the numbers and what would help, when the fixed parts do not fit the
// budget.
absl::StatusOr<SizedPlan> PlanEngineMemory(const EngineOptions& options,
                                           const model::ModelConfig& config, int64_t weight_bytes,
                                           const ops::OpsFootprint& footprint);

// RESOURCE_EXHAUSTED when the plan takes more memory of the host than this process may use, which
// on the CPU device holds "device memory" too. The kernel hands memory out on trust and ends the
// process without a word when it is written to, in the middle of somebody's request.
absl::Status CheckFitsMachine(const MemoryPlan& plan, DeviceKind device, int64_t usable_bytes);

}  // namespace writescope::runtime
