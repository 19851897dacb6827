// Decode steps over resident KV as recordings: submitting a step launch by launch takes the host
// longer than a GPU takes to run it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/ops/ops.h"

namespace writescope::runtime {

struct RecordingCounts {
  int64_t replayed_steps = 0;  // Submitted as a recording
  int64_t plain_steps = 0;     // Submitted call by call, for want of one
  int64_t failures = 0;        // Recordings that could not be made
};

// Engine thread. Keeps a recording for each number of rows, the ones used last. A number is
// recorded when it comes a second time: by then all that its calls use has been loaded, and a batch
// that is seen once costs nothing.
class StepRecordings {
 public:
  // Of at most `max_kept`; 0 records nothing. `recorder` must outlive this.
  StepRecordings(ops::Recorder& recorder, int max_kept)
      : recorder_(recorder), max_kept_(max_kept) {}

  // Submits a step of `rows` rows, whose calls are always the same ones: as recorded, or by
  // `submit`. After a failure, which is logged once, always by `submit`.
  void Submit(int rows, const std::function<void()>& submit);

  const RecordingCounts& counts() const { return counts_; }
  int num_kept() const { return static_cast<int>(kept_.size()); }

 private:
  struct Kept {
    int rows = 0;
    int64_t last_used = 0;  // By number of the step
    std::unique_ptr<ops::Recording> recording;
  };
  Kept* Find(int rows);
  absl::StatusOr<std::unique_ptr<ops::Recording>> Keep(const std::function<void()>& submit);
  // Null when nothing was recorded.
  const ops::Recording* Record(int rows, const std::function<void()>& submit);

  ops::Recorder& recorder_;
  const int max_kept_;
  std::vector<Kept> kept_;
  std::vector<bool> seen_;  // By rows
  int64_t num_steps_ = 0;
  RecordingCounts counts_;
};

}  // namespace writescope::runtime
