#include "engine/runtime/worker_tuner.h"

#include <algorithm>
#include <cmath>

namespace writescope::runtime {
namespace {

// The first steps of a kind are recorded, and say nothing.
constexpr int kSettledSteps = 3;
constexpr int kQuadsOfTrial = 8;
// Means of 16 steps each differ by about this much by chance.
constexpr double kLeastGain = 0.015;
// A trial ends before where the difference is three times what it would be by chance, of one quad.
constexpr double kClear = 0.15;
constexpr int kQuadsAtLeast = 2;
// A step that is late by more than half of the quad's shortest counts as no more than that: one of
// the many that it takes to tell.
constexpr double kMostOfShortest = 1.5;
// Steps between trials: of a number that has just won, that has just lost, and at most.
constexpr int64_t kSoon = 8;
constexpr int64_t kLater = 64;
constexpr int64_t kLatest = 2048;

}  // namespace

WorkerTuner::WorkerTuner(int most)
    : most_(std::max(most, 1)),
      least_(std::max(1, most_ / 4)),
      best_(most_),
      candidate_(most_),
      stride_(-std::max(1, most_ / 6)),
      interval_(kLater),
      until_next_(kSoon) {}

void WorkerTuner::Begin() {
  candidate_ = std::clamp(best_ + stride_, least_, most_);
  in_quad_ = num_quads_ = 0;
  best_cost_ = candidate_cost_ = 0;
}

bool WorkerTuner::End() {
  const bool wins = candidate_cost_ < (1 - kLeastGain) * best_cost_;
  if (wins) {
    best_ = candidate_;
    stride_ *= 2;
    other_way_lost_ = false;
    interval_ = kLater;
    until_next_ = kSoon;
  } else {
    // The other way at once, and when both have lost later and later.
    stride_ = stride_ < 0 ? 1 : -1;
    until_next_ = other_way_lost_ ? interval_ : kSoon;
    if (other_way_lost_) interval_ = std::min(2 * interval_, kLatest);
    other_way_lost_ = !other_way_lost_;
  }
  candidate_ = best_;
  return wins;
}

bool WorkerTuner::Learn(const Step& step) {
  if (step.batch_size != kind_.batch_size || step.micro_batches != kind_.micro_batches) {
    kind_ = step;
    settled_ = in_quad_ = 0;
  }
  if (settled_ < kSettledSteps) {
    ++settled_;
    in_quad_ = 0;
    return false;
  }
  if (!IsInTrial()) {
    if (--until_next_ > 0) return false;
    Begin();
    if (IsInTrial()) return false;
    // There is none further that way.
    End();
    return false;
  }
  quad_[in_quad_] = step.cost;
  if (++in_quad_ < kQuad) return false;
  in_quad_ = 0;
  const double most = kMostOfShortest * *std::min_element(quad_, quad_ + kQuad);
  for (double& cost : quad_) cost = std::min(cost, most);
  best_cost_ += quad_[0] + quad_[3];
  candidate_cost_ += quad_[1] + quad_[2];
  ++num_quads_;
  const bool is_clear = num_quads_ >= kQuadsAtLeast &&
                        std::abs(candidate_cost_ / best_cost_ - 1) > kClear / std::sqrt(num_quads_);
  return (is_clear || num_quads_ == kQuadsOfTrial) && End();
}

}  // namespace writescope::runtime
