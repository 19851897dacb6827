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

StepRecordings::Kept* StepRecordings::Find(int rows) {
  const auto it =
      std::find_if(kept_.begin(), kept_.end(), [&](const Kept& k) { return k.rows == rows; });
  return it == kept_.end() ? nullptr : &*it;
}

absl::StatusOr<std::unique_ptr<ops::Recording>> StepRecordings::Keep(
    const std::function<void()>& submit) {
  RETURN_IF_ERROR(recorder_.BeginRecording());
  submit();
  return recorder_.EndRecording();
}

const ops::Recording* StepRecordings::Record(int rows, const std::function<void()>& submit) {
  if (max_kept_ == 0 || counts_.failures > 0) return nullptr;
  const size_t index = static_cast<size_t>(rows);
  if (index >= seen_.size()) seen_.resize(index + 1);
  if (!seen_[index]) {
    seen_[index] = true;
    return nullptr;
  }
  if (num_kept() == max_kept_) {
    const auto oldest =
        std::min_element(kept_.begin(), kept_.end(),
                         [](const Kept& a, const Kept& b) { return a.last_used < b.last_used; });
    if (num_steps_ - oldest->last_used < kIdleSteps) return nullptr;
    kept_.erase(oldest);
  }
  absl::StatusOr<std::unique_ptr<ops::Recording>> recording = Keep(submit);
  if (!recording.ok()) {
    ++counts_.failures;
    Log(LogLevel::kWarning, "decode steps cannot be recorded; each is submitted call by call",
        {{"rows", rows}, {"status", recording.status().ToString()}});
    return nullptr;
  }
  kept_.push_back({.rows = rows, .recording = *std::move(recording)});
  Log(LogLevel::kInfo, "decode step recorded", {{"rows", rows}, {"kept", num_kept()}});
  return kept_.back().recording.get();
}

void StepRecordings::Submit(int rows, const std::function<void()>& submit) {
  ++num_steps_;
  const Kept* kept = Find(rows);
  const ops::Recording* recording = kept != nullptr ? kept->recording.get() : Record(rows, submit);
  if (recording == nullptr) {
    ++counts_.plain_steps;
    submit();
    return;
  }
  Find(rows)->last_used = num_steps_;
  ++counts_.replayed_steps;
  recorder_.Replay(*recording);
}

}  // namespace writescope::runtime
