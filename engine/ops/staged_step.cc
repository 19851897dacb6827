#include "engine/ops/staged_step.h"

#include "engine/base/check.h"

namespace writescope::ops {

void StagedStep::Assign(const StepInputs& inputs) {
  CHECK_EQ(inputs.positions.size(), inputs.tokens.size());
  CHECK_EQ(inputs.targets.size(), inputs.tokens.size());
  kv_ = inputs.kv;
  num_heads_ = inputs.num_heads;
  tokens_.assign(inputs.tokens.begin(), inputs.tokens.end());
  positions_.assign(inputs.positions.begin(), inputs.positions.end());
  targets_.assign(inputs.targets.begin(), inputs.targets.end());
  spans_.assign(inputs.spans.begin(), inputs.spans.end());
  readers_.assign(inputs.readers.begin(), inputs.readers.end());
  rows_.assign(inputs.rows.begin(), inputs.rows.end());
}

std::span<const KvTarget> StagedStep::TargetsOf(int layer) {
  layer_targets_ = targets_;
  for (KvTarget& target : layer_targets_) target.block += layer * target.layer_stride_bytes;
  return layer_targets_;
}

AttendArgs StagedStep::AttendArgsOf(int layer, const float* q, const AttendState& state) {
  layer_spans_ = spans_;
  for (AttendSpan& span : layer_spans_) span.base += layer * span.layer_stride_bytes;
  return {.kv = kv_,
          .num_heads = num_heads_,
          .q = q,
          .spans = layer_spans_,
          .readers = readers_,
          .rows = rows_,
          .state = state};
}

}  // namespace writescope::ops
