// Decode steps as recordings: submitting a step launch by launch takes the host longer than a GPU
// takes to run it. A step over resident KV is one recording; one with spilled KV has a recording
// for each stretch between two calls of attention.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/ops/ops.h"

namespace writescope::runtime {

struct RecordingCounts {
  int64_t replayed_steps = 0;  // Submitted as recordings
  int64_t plain_steps = 0;     // Submitted call by call, for want of one
  int64_t failures = 0;        // Recordings that could not be made
};

// Steps of one kind and as many rows consist of the same calls.
struct StepShape {
  bool spilled = false;
  int rows = 0;
  int first_rows = rows;  // Of the first micro-batch; below `rows` there are two
  int micro_batches() const { return first_rows < rows ? 2 : 1; }
  bool operator==(const StepShape&) const = default;
};

// Engine thread. Keeps what was recorded of each shape of step, those used last. A shape is
// recorded when it comes a second time: by then all that its calls use has been loaded, and a batch
// that is seen once costs nothing.
class StepRecordings {
  struct Kept;

 public:
  // Memory that a shape's recordings take, as a multiple of what those of a resident step take.
  static int Cost(const StepShape& shape) {
    return shape.spilled ? ops::OpsFootprint::kSmallRecordings * shape.micro_batches() : 1;
  }
  // Of shapes that cost at most `max_cost` together; 0 records nothing. `recorder` must outlive
  // this.
  StepRecordings(ops::Recorder& recorder, int max_cost)
      : recorder_(recorder), max_cost_(max_cost) {}

  // A step while it is submitted. Another may begin and end meanwhile.
  class Step {
   public:
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;
    ~Step();
    // Submits the next part of the step: as recorded, or by `submit`.
    void Submit(const std::function<void()>& submit);

   private:
    friend class StepRecordings;
    Step(StepRecordings& owner, int num_parts, Kept* kept)
        : owner_(owner), num_parts_(num_parts), kept_(kept) {}

    StepRecordings& owner_;
    const int num_parts_;
    Kept* kept_;  // Null: call by call
    int next_part_ = 0;
  };
  // A step without a shape is like no other, and goes call by call. After a failure, which is
  // logged once, nothing new is recorded.
  Step Begin(const std::optional<StepShape>& shape, int num_parts);

  const RecordingCounts& counts() const { return counts_; }
  int num_kept() const { return static_cast<int>(kept_.size()); }

 private:
  struct Kept {
    StepShape shape;
    int64_t last_used = 0;  // By number of the step
    bool in_use = false;
    std::vector<std::unique_ptr<ops::Recording>> parts;
  };
  Kept* Find(const StepShape& shape);
  int TotalCost() const;
  // A place for what will be recorded of the shape; null when nothing is to be.
  Kept* MakePlace(const StepShape& shape);
  void Drop(const Kept* kept);
  absl::StatusOr<std::unique_ptr<ops::Recording>> Record(const std::function<void()>& submit);

  ops::Recorder& recorder_;
  const int max_cost_;
  std::vector<std::unique_ptr<Kept>> kept_;
  std::vector<StepShape> seen_;
  int64_t num_steps_ = 0;
  RecordingCounts counts_;
};

}  // namespace writescope::runtime
