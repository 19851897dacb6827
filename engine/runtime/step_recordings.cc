#include "engine/runtime/step_recordings.h"

#include <algorithm>
#include <utility>

#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace writescope::runtime {
namespace {

// A recording makes room for another only when it has not been used for so many steps: to record
// takes as long as some steps.
constexpr int64_t kIdleSteps = 64;

}  // namespace

StepRecordings::Kept* StepRecordings::Find(const StepShape& shape) {
  const auto it =
      std::find_if(kept_.begin(), kept_.end(), [&](const auto& k) { return k->shape == shape; });
  return it == kept_.end() ? nullptr : it->get();
}

int StepRecordings::TotalCost() const {
  int cost = 0;
  for (const auto& kept : kept_) cost += Cost(kept->shape);
  return cost;
}

StepRecordings::Kept* StepRecordings::MakePlace(const StepShape& shape) {
  if (Cost(shape) > max_cost_ || counts_.failures > 0) return nullptr;
  if (std::find(seen_.begin(), seen_.end(), shape) == seen_.end()) {
    seen_.push_back(shape);
    return nullptr;
  }
  while (TotalCost() + Cost(shape) > max_cost_) {
    const auto oldest =
        std::min_element(kept_.begin(), kept_.end(),
                         [](const auto& a, const auto& b) { return a->last_used < b->last_used; });
    if ((*oldest)->in_use || num_steps_ - (*oldest)->last_used < kIdleSteps) return nullptr;
    kept_.erase(oldest);
  }
  kept_.push_back(std::make_unique<Kept>(Kept{.shape = shape}));
  return kept_.back().get();
}

void StepRecordings::Drop(const Kept* kept) {
  std::erase_if(kept_, [&](const auto& k) { return k.get() == kept; });
}

absl::StatusOr<std::unique_ptr<ops::Recording>> StepRecordings::Record(
    const std::function<void()>& submit) {
  RETURN_IF_ERROR(recorder_.BeginRecording());
  submit();
  return recorder_.EndRecording();
}

StepRecordings::Step StepRecordings::Begin(const std::optional<StepShape>& shape, int num_parts) {
  ++num_steps_;
  Kept* kept = nullptr;
  if (shape.has_value()) {
    kept = Find(*shape);
    if (kept == nullptr) kept = MakePlace(*shape);
  }
  if (kept != nullptr) {
    kept->last_used = num_steps_;
    kept->in_use = true;
  }
  return Step(*this, num_parts, kept);
}

void StepRecordings::Step::Submit(const std::function<void()>& submit) {
  const size_t part = static_cast<size_t>(next_part_++);
  if (kept_ != nullptr && part == kept_->parts.size()) {
    absl::StatusOr<std::unique_ptr<ops::Recording>> recording = owner_.Record(submit);
    if (recording.ok()) {
      kept_->parts.push_back(*std::move(recording));
      if (next_part_ == num_parts_) {
        Log(LogLevel::kInfo, "decode step recorded",
            {{"rows", kept_->shape.rows},
             {"spilled", kept_->shape.spilled},
             {"micro_batches", kept_->shape.micro_batches()},
             {"kept", owner_.num_kept()}});
      }
    } else {
      ++owner_.counts_.failures;
      Log(LogLevel::kWarning, "decode steps cannot be recorded; each is submitted call by call",
          {{"rows", kept_->shape.rows}, {"status", recording.status().ToString()}});
      owner_.Drop(kept_);
      kept_ = nullptr;
    }
  }
  if (kept_ == nullptr) {
    submit();
  } else {
    owner_.recorder_.Replay(*kept_->parts[part]);
  }
}

StepRecordings::Step::~Step() {
  ++(kept_ != nullptr ? owner_.counts_.replayed_steps : owner_.counts_.plain_steps);
  if (kept_ == nullptr) return;
  kept_->in_use = false;
  // Of a step that was given up only the beginning was recorded.
  if (static_cast<int>(kept_->parts.size()) < num_parts_) owner_.Drop(kept_);
}

}  // namespace writescope::runtime
