// The messages of control.proto to and from the engine's own types.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "engine/runtime/engine.h"
#include "engine/runtime/step_stats.h"
#include "writescope/v1/control.pb.h"

namespace writescope::server {

void ToProto(const runtime::StepStats& stats, v1::StepTelemetry* proto);
void ToProto(const runtime::ShareState& state, v1::ShareState* proto);
void ToProto(const runtime::RegionState& state, v1::RegionState* proto);
void ToProto(const roofline::MachineProfile& profile, v1::MachineProfile* proto);
v1::ShareOutcome ToProto(runtime::ShareOutcome outcome);
const char* OutcomeName(runtime::ShareOutcome outcome);

// INVALID_ARGUMENT for what the engine's types cannot hold, an empty table and a lease that is not
// positive. Shares are checked by the engine.
absl::StatusOr<runtime::ShareUpdate> FromProto(const v1::SetCpuShareRequest& proto);

}  // namespace writescope::server
