// writescope status: where the KV lies and who attends to it, as bars; writescope health for
// scripts.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "server/cli/client.h"
#include "writescope/v1/control.pb.h"

namespace writescope::cli {

// What some steps of telemetry add up to.
struct StepSummary {
  int steps = 0;
  double seconds = 0;  // Wall-clock time that they cover.
  double cpu_bytes = 0;
  double link_bytes = 0;
  double resident_bytes = 0;
  double spilled_bytes = 0;
  double cpu_busy_seconds = 0;
  double link_busy_seconds = 0;
  double step_seconds = 0;
  double predicted_seconds = 0;
  double generated_tokens = 0;
  uint32_t batch_size = 0;  // Of the last.
  double observed_share = 0;
  double planned_share = 0;

  void Add(const v1::StepTelemetry& step);
};

// Several lines. `steps` has the last step, or those of the last interval.
std::string FormatStatus(const v1::GetWorkerStateResponse& state, const StepSummary& steps);

// `watch`: draws anew every `interval`, until Ctrl-C.
int RunStatus(const ClientOptions& client, bool watch, absl::Duration interval);

// 0 when `service` serves; for container health checks.
int RunHealth(const ClientOptions& client, const std::string& service);

}  // namespace writescope::cli
