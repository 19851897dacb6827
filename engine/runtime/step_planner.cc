#include "engine/runtime/step_planner.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace writescope::runtime {

StepPlanner::StepPlanner(const Options& options, StepModel model)
    : options_(options), model_(std::move(model)) {}

StepPlanner::Plan StepPlanner::PlanStep(const ModelRunner& runner, std::span<const int> slots,
                                        const StepBytes& bytes, const Share& share) const {
  const StepModel::Part whole = {.batch_size = static_cast<int>(slots.size()), .bytes = bytes};
  Plan plan;
  plan.share.cpu_share = share.cpu_share;
  plan.predicted_seconds = model_.PredictSeconds(whole.batch_size, bytes, share.cpu_share);
  // A share of 0 is the roofline's word that the link is done before the CPU could help.
  plan.share.handoff = share.cpu_share > 0;
  plan.share.meet = options_.cut == CutMode::kMeet && plan.share.handoff;
  if (!plan.share.handoff || slots.size() < 2 || options_.micro_batching == MicroBatching::kOne) {
    return plan;
  }
  MicroBatches halves = runner.SplitInTwo(slots);
  std::array<StepModel::Part, 2> parts;
  for (size_t i = 0; i < parts.size(); ++i) {
    std::vector<int> of_part;
    for (const int slice : halves[i]) of_part.push_back(slots[static_cast<size_t>(slice)]);
    parts[i] = {.batch_size = static_cast<int>(of_part.size()), .bytes = runner.BytesOf(of_part)};
  }
  const StepModel::TwoParts two = model_.PlanTwoParts(parts, whole, share.cpu_share);
  if (!two.pays && options_.micro_batching != MicroBatching::kTwo) return plan;
  plan.micro_batches = std::move(halves);
  plan.predicted_seconds = two.seconds;
  if (!share.is_set) {
    plan.share.cpu_share =
        std::clamp(two.cpu_share, options_.shares.min_share, options_.shares.max_share);
  }
  return plan;
}

std::optional<roofline::ShareTable> StepPlanner::Learn(StepModel::TakenStep step,
                                                       const attention::AttentionStats& attention,
                                                       double now_s) {
  step.part_dense_seconds = attention.device_dense_s / 2;
  model_.LearnStep(step);
  if (step.micro_batches == 1) model_.LearnDense(step.batch_size, attention.dense_s);
  model_.LearnDeviceAttention(attention.resident_bytes + attention.link_bytes,
                              attention.device_attention_s);
  return model_.NewTable(now_s);
}

}  // namespace writescope::runtime
