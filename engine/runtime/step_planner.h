// How a decode step over spilled KV is taken: with the CPU or without it, in one micro-batch or
// two.
#pragma once

#include <optional>
#include <span>

#include "engine/attention/hybrid_attention.h"
#include "engine/roofline/roofline.h"
#include "engine/roofline/share_table.h"
#include "engine/runtime/engine.h"
#include "engine/runtime/micro_batches.h"
#include "engine/runtime/model_runner.h"
#include "engine/runtime/step_model.h"

namespace writescope::runtime {

// Engine thread.
class StepPlanner {
 public:
  struct Options {
    CutMode cut = CutMode::kMeet;
    MicroBatching micro_batching = MicroBatching::kAuto;
    roofline::ShareInterval shares;  // That the placement allows
  };
  StepPlanner(const Options& options, StepModel model);

  // The CPU's share of a step of the whole batch. One that a controller or an operator has set is
  // kept in steps of two micro-batches too.
  struct Share {
    double cpu_share = 0;
    bool is_set = false;
  };
  struct Plan {
    attention::SharePlan share;
    MicroBatches micro_batches;  // As in StepOptions
    double predicted_seconds = 0;
  };
  // Of a step over these slots, which reads `bytes`.
  Plan PlanStep(const ModelRunner& runner, std::span<const int> slots, const StepBytes& bytes,
                const Share& share) const;

  // What a step has shown that was taken as planned; its D of a part is found here. A table for
  // where no share is set, when the step makes it another.
  std::optional<roofline::ShareTable> Learn(StepModel::TakenStep step,
                                            const attention::AttentionStats& attention,
                                            double now_s);

  const StepModel& model() const { return model_; }

 private:
  const Options options_;
  StepModel model_;
};

}  // namespace writescope::runtime
