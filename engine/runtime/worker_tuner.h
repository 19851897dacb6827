// How many CPU workers attend to a step.
#pragma once

#include <cstdint>

namespace writescope::runtime {

// A worker that the system takes off its core keeps what it has begun with, and its layer waits for
// it. Beside other programs, or the many threads of a server under load, fewer workers can be
// faster: on 16 cores 14 workers decoded a batch of 20 streams in 25 to 27 ms a step, 13 in 23.
// Steps show which number is: now and then some are taken with another one in turns, and the better
// stays. The longer a number has been the best, the rarer the trials.
//
// Pure, but for what it has been told. Engine thread.
class WorkerTuner {
 public:
  // Between a quarter of `most` and `most`, with which it begins.
  explicit WorkerTuner(int most);

  // For the next step.
  int num_workers() const { return IsCandidatesTurn() ? candidate_ : best_; }
  int best() const { return best_; }

  // A step with num_workers() of a kind: only steps of one kind are compared. `cost` is its time in
  // units of what was predicted for it. True when best() has changed.
  struct Step {
    int batch_size = 0;
    int micro_batches = 1;
    double cost = 0;
  };
  bool Learn(const Step& step);

 private:
  static constexpr int kQuad = 4;

  bool IsInTrial() const { return candidate_ != best_; }
  // Best, candidate, candidate, best: what drifts is shared out evenly.
  bool IsCandidatesTurn() const { return IsInTrial() && (in_quad_ == 1 || in_quad_ == 2); }
  void Begin();
  bool End();

  const int most_;
  const int least_;
  int best_;
  int candidate_;  // best_ when there is no trial
  int stride_;
  bool other_way_lost_ = false;
  int64_t interval_;    // Steps between trials when both ways have lost
  int64_t until_next_;  // Steps to the next trial
  Step kind_;
  int settled_ = 0;  // Steps of one kind in a row, counted to a few
  int in_quad_ = 0;
  double quad_[kQuad] = {};
  int num_quads_ = 0;
  double best_cost_ = 0, candidate_cost_ = 0;
};

}  // namespace writescope::runtime
