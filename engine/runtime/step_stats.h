// What one step cost, in named units: the telemetry that the controller learns from.
#pragma once

#include <cstdint>

#include "absl/time/time.h"

namespace writescope::runtime {

enum class StepKind { kDecode, kPrefill };

// Bytes of KV that a step reads, each shared byte once.
struct StepBytes {
  int64_t spilled = 0;
  int64_t stream = 0;  // Of the spilled ones, those that only the link can carry
  int64_t host = 0;    // and those that only the CPU can read
  int64_t resident = 0;
};

// Busy times are wall-clock, summed over layers. Field meanings are those of
// writescope.v1.StepTelemetry.
struct StepStats {
  int64_t step = 0;
  StepKind kind = StepKind::kDecode;
  absl::Time end_time;
  double step_seconds = 0;
  int batch_size = 0;
  int micro_batches = 1;
  int64_t prefill_tokens = 0;
  int64_t spilled_bytes = 0;
  int64_t stream_region_bytes = 0;
  int64_t host_region_bytes = 0;
  int64_t cpu_bytes = 0;
  int64_t link_bytes = 0;
  int64_t resident_bytes = 0;
  double cpu_busy_seconds = 0;
  double link_busy_seconds = 0;
  double both_busy_seconds = 0;
  double dense_seconds = 0;
  double device_attention_seconds = 0;
  int64_t cpu_bytes_both_busy = 0;
  int64_t link_bytes_both_busy = 0;
  int copies = 0;
  int cpu_workers = 0;
  double observed_cpu_share = 0;
  double planned_cpu_share = 0;
  int64_t share_generation = 0;
  int64_t moved_bytes_total = 0;
  double predicted_step_seconds = 0;
};

}  // namespace writescope::runtime
