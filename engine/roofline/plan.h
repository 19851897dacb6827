// What a machine would do with a model: memory and decode speed, predicted from numbers alone.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "engine/roofline/machine_profile.h"
#include "engine/roofline/roofline.h"

namespace writescope::roofline {

// A model as the prediction sees it. Bytes are as served: after quantisation, with the KV type in
// use.
struct ModelShape {
  std::string name;
  int num_layers = 0;
  int64_t weight_bytes = 0;         // All of them; they stay on the device.
  int64_t expert_weight_bytes = 0;  // Of them, those of routed experts.
  int num_experts = 0;              // Routed, per layer; 0 for a dense model.
  int experts_per_token = 0;
  int64_t kv_bytes_per_token = 0;  // All layers.
  double dense_seconds = 0;        // D; 0 has it estimated from the weights that the batch touches.
};

struct DecodeRequest {
  int batch_size = 1;
  int64_t context_tokens = 0;  // Of each sequence.
  // Fixed costs on the device besides weights and KV.
  int64_t workspace_bytes = int64_t{1} << 29;
  int64_t ring_bytes = int64_t{1} << 28;
  int tail_tokens_per_sequence = 128;  // Open tails: two units of 64 tokens.
  int64_t copy_bytes = int64_t{2} << 20;
};

// Where the bytes go.
struct MemoryPlan {
  int64_t device_budget_bytes = 0;
  int64_t weight_bytes = 0;
  int64_t workspace_bytes = 0;
  int64_t ring_bytes = 0;
  int64_t tail_bytes = 0;
  int64_t device_kv_bytes = 0;    // Room for sealed KV on the device; what is left of the budget.
  int64_t kv_bytes = 0;           // Of the whole batch.
  int64_t resident_kv_bytes = 0;  // Of them on the device.
  int64_t spilled_kv_bytes = 0;   // S, in host memory.
  int64_t host_budget_bytes = 0;  // 0: no limit is known.
  bool fits_host = true;          // spilled_kv_bytes is within it.
  int64_t max_resident_tokens =
      0;  // Nothing spills up to this many tokens of all sequences together.
  int64_t max_context_tokens =
      0;  // Per sequence at this batch size; 0 when no host limit is known.
};

struct DecodePlan {
  MemoryPlan memory;
  double dense_seconds = 0;
  double device_attention_seconds = 0;  // Over resident KV.
  double share = 0;
  double step_seconds = 0;
  double tokens_per_second = 0;    // Of the batch.
  double stream_step_seconds = 0;  // All spilled KV to the device: share 0.
  double cpu_step_seconds = 0;     // All of it on the CPU: share 1.
  bool ping_pong = false;          // Two micro-batches in turn would be faster, with:
  double ping_pong_step_seconds = 0;
};

// RESOURCE_EXHAUSTED when weights and fixed costs exceed the device's budget; INVALID_ARGUMENT for
// a shape or request without sense; both with the numbers.
absl::StatusOr<MemoryPlan> PlanMemory(const ModelShape& shape, const MachineProfile& profile,
                                      const DecodeRequest& request);
absl::StatusOr<DecodePlan> PlanDecode(const ModelShape& shape, const MachineProfile& profile,
                                      const DecodeRequest& request);

// D of a batch: the weights that it touches (experts are hit at random) at the device's dense rate,
// and a fixed time per layer. A rough guess, good for planning; a worker measures D.
double EstimateDenseSeconds(const ModelShape& shape, const MachineProfile& profile, int batch_size);

}  // namespace writescope::roofline
