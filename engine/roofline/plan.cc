#include "engine/roofline/plan.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"

namespace writescope::roofline {
namespace {

// Keeps products of the checks below inside int64_t.
constexpr int64_t kMaxContextTokens = int64_t{1} << 31;
constexpr int kMaxBatchSize = 1 << 16;
constexpr int64_t kMaxKvBytesPerToken = int64_t{1} << 26;
constexpr int64_t kMaxTokens = int64_t{1} << 36;

absl::Status CheckRange(const char* name, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("plan: ", name, " is ", value, ", it has to be from ", min, " to ", max));
}

absl::Status CheckInputs(const ModelShape& shape, const DecodeRequest& request) {
  constexpr int64_t kMaxBytes = int64_t{1} << 50;
  RETURN_IF_ERROR(CheckRange("num_layers", shape.num_layers, 1, 10000));
  RETURN_IF_ERROR(CheckRange("weight_bytes", shape.weight_bytes, 0, kMaxBytes));
  RETURN_IF_ERROR(
      CheckRange("expert_weight_bytes", shape.expert_weight_bytes, 0, shape.weight_bytes));
  RETURN_IF_ERROR(CheckRange("num_experts", shape.num_experts, 0, 1 << 20));
  RETURN_IF_ERROR(CheckRange("experts_per_token", shape.experts_per_token,
                             shape.num_experts > 0 ? 1 : 0, shape.num_experts));
  RETURN_IF_ERROR(
      CheckRange("kv_bytes_per_token", shape.kv_bytes_per_token, 1, kMaxKvBytesPerToken));
  RETURN_IF_ERROR(CheckRange("batch_size", request.batch_size, 1, kMaxBatchSize));
  RETURN_IF_ERROR(CheckRange("context_tokens", request.context_tokens, 1, kMaxContextTokens));
  RETURN_IF_ERROR(CheckRange("tokens of all sequences", request.batch_size * request.context_tokens,
                             1, kMaxTokens));
  RETURN_IF_ERROR(CheckRange("workspace_bytes", request.workspace_bytes, 0, kMaxBytes));
  RETURN_IF_ERROR(CheckRange("ring_bytes", request.ring_bytes, 0, kMaxBytes));
  RETURN_IF_ERROR(
      CheckRange("tail_tokens_per_sequence", request.tail_tokens_per_sequence, 0, 4096));
  RETURN_IF_ERROR(CheckRange("copy_bytes", request.copy_bytes, 1, kMaxBytes));
  if (!(shape.dense_seconds >= 0 && shape.dense_seconds < kNeverSeconds)) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan: dense_seconds is ", shape.dense_seconds, ", it has to be at least 0"));
  }
  return absl::OkStatus();
}

// Two micro-batches are only possible with two sequences.
void AddPingPong(const ModelShape& shape, const MachineProfile& profile,
                 const DecodeRequest& request, const StepLoad& load, const Rates& rates,
                 DecodePlan& plan) {
  if (request.batch_size < 2 || plan.memory.spilled_kv_bytes == 0) return;
  const double full = EstimateDenseSeconds(shape, profile, request.batch_size);
  const double half = EstimateDenseSeconds(shape, profile, (request.batch_size + 1) / 2);
  // A given D is scaled as the estimate scales.
  const double half_dense = full > 0 ? plan.dense_seconds * half / full : plan.dense_seconds;
  StepLoad parts = load;
  parts.dense_seconds = PingPongDenseSeconds(half_dense, shape.num_layers);
  plan.ping_pong_step_seconds = BestPingPong(parts, rates, half_dense).step_seconds;
  plan.ping_pong = plan.ping_pong_step_seconds < plan.step_seconds;
}

}  // namespace

double EstimateDenseSeconds(const ModelShape& shape, const MachineProfile& profile,
                            int batch_size) {
  const double shared_bytes = static_cast<double>(shape.weight_bytes - shape.expert_weight_bytes);
  double hit_fraction = 1;
  if (shape.num_experts > 0) {
    const double missed_by_one =
        1 - static_cast<double>(shape.experts_per_token) / static_cast<double>(shape.num_experts);
    hit_fraction = 1 - std::pow(missed_by_one, std::max(batch_size, 1));
  }
  const double bytes = shared_bytes + hit_fraction * static_cast<double>(shape.expert_weight_bytes);
  const double rate = profile.rates.device * profile.dense_efficiency;
  const double reading = rate > 0 ? bytes / rate : 0;
  return std::min(reading + shape.num_layers * profile.dense_per_layer_seconds, kNeverSeconds);
}

absl::StatusOr<MemoryPlan> PlanMemory(const ModelShape& shape, const MachineProfile& profile,
                                      const DecodeRequest& request) {
  RETURN_IF_ERROR(profile.Validate());
  RETURN_IF_ERROR(CheckInputs(shape, request));
  const int64_t batch = request.batch_size;
  MemoryPlan plan;
  plan.device_budget_bytes = profile.device_budget_bytes;
  plan.host_budget_bytes = profile.host_budget_bytes;
  plan.weight_bytes = shape.weight_bytes;
  plan.workspace_bytes = request.workspace_bytes;
  plan.ring_bytes = request.ring_bytes;
  plan.tail_bytes = batch * request.tail_tokens_per_sequence * shape.kv_bytes_per_token;
  const int64_t fixed_bytes =
      plan.weight_bytes + plan.workspace_bytes + plan.ring_bytes + plan.tail_bytes;
  if (fixed_bytes > plan.device_budget_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "plan: ", shape.name, " needs ", fixed_bytes / kMiB, " MiB on the device (weights ",
        plan.weight_bytes / kMiB, ", workspace ", plan.workspace_bytes / kMiB, ", ring ",
        plan.ring_bytes / kMiB, ", open tails of ", batch, " sequences ", plan.tail_bytes / kMiB,
        "), the budget of ", profile.name, " is ", plan.device_budget_bytes / kMiB, " MiB"));
  }
  plan.device_kv_bytes = plan.device_budget_bytes - fixed_bytes;
  plan.kv_bytes = batch * request.context_tokens * shape.kv_bytes_per_token;
  const int64_t device_room = plan.device_kv_bytes + plan.tail_bytes;
  plan.resident_kv_bytes = std::min(plan.kv_bytes, device_room);
  plan.spilled_kv_bytes = plan.kv_bytes - plan.resident_kv_bytes;
  plan.max_resident_tokens = device_room / shape.kv_bytes_per_token;
  if (plan.host_budget_bytes > 0) {
    plan.fits_host = plan.spilled_kv_bytes <= plan.host_budget_bytes;
    plan.max_context_tokens =
        (device_room + plan.host_budget_bytes) / shape.kv_bytes_per_token / batch;
  }
  return plan;
}

absl::StatusOr<DecodePlan> PlanDecode(const ModelShape& shape, const MachineProfile& profile,
                                      const DecodeRequest& request) {
  DecodePlan plan;
  ASSIGN_OR_RETURN(plan.memory, PlanMemory(shape, profile, request));
  const Rates rates = profile.AttentionRates(static_cast<double>(request.copy_bytes));
  plan.dense_seconds = shape.dense_seconds > 0
                           ? shape.dense_seconds
                           : EstimateDenseSeconds(shape, profile, request.batch_size);
  plan.device_attention_seconds =
      static_cast<double>(plan.memory.resident_kv_bytes) / profile.rates.device;

  StepLoad load;
  load.spilled_bytes = static_cast<double>(plan.memory.spilled_kv_bytes);
  load.dense_seconds = plan.dense_seconds;
  load.device_attention_seconds = plan.device_attention_seconds;
  load.handoff_seconds = shape.num_layers * profile.handoff_per_layer_seconds;
  const BestShareResult best = BestShare(load, rates);
  plan.share = best.share;
  plan.step_seconds = best.step_seconds;
  plan.tokens_per_second = best.step_seconds > 0 ? request.batch_size / best.step_seconds : 0;
  plan.stream_step_seconds = PredictStep(load, rates, 0);
  plan.cpu_step_seconds = PredictStep(load, rates, 1);
  AddPingPong(shape, profile, request, load, rates, plan);
  return plan;
}

}  // namespace writescope::roofline
