#include "controller/robust_mean.h"

#include <algorithm>
#include <cmath>

namespace writescope::controller {
namespace {

// Far outside every quantity that is tracked (bytes per second, seconds, ratios), and far inside
// double.
constexpr double kMin = 1e-15;
constexpr double kMax = 1e15;
// A sample this many deviations off says nothing about the deviation, and weighs no more than this.
constexpr double kClip = 3;
// The mean of the absolute values of a normal distribution, times this, is its deviation.
constexpr double kAbsoluteToDeviation = 1.2533;

bool Usable(double value) { return value >= kMin && value <= kMax; }

}  // namespace

RobustMean::RobustMean(const Options& options)
    : options_(options), deviation_(options.first_deviation) {}

void RobustMean::Seed(double value) {
  if (!Usable(value)) return;
  value_ = value;
  num_samples_ = 0;
  num_recent_ = 0;
}

void RobustMean::Scale(double factor) {
  if (Usable(factor) && Usable(value_ * factor)) value_ *= factor;
}

double RobustMean::Off(int age) const {
  const size_t index = (next_ + kDriftWindow - 1 - static_cast<size_t>(age)) % kDriftWindow;
  return recent_[index] - std::log(value_);
}

RobustMean::Verdict RobustMean::Add(double sample) {
  if (!Usable(sample)) return Verdict::kRefused;
  if (num_samples_ == 0) value_ = sample;
  recent_[next_] = std::log(sample);
  next_ = (next_ + 1) % kDriftWindow;
  num_recent_ = std::min(num_recent_ + 1, kDriftWindow);
  num_samples_ = std::min(num_samples_ + 1, 1 << 20);
  if (FollowJump() || FollowDrift()) return Verdict::kChanged;

  // Logarithms: a rate and its inverse are then the same measurement.
  const double off = Off(0);
  const double limit = kClip * deviation_;
  const double weight = std::max(options_.weight, 1.0 / num_samples_);
  value_ *= std::exp(weight * std::clamp(off, -limit, limit));
  value_ = std::clamp(value_, kMin, kMax);
  if (std::abs(off) <= limit && num_samples_ > 1) {
    deviation_ += options_.weight * (std::abs(off) * kAbsoluteToDeviation - deviation_);
    deviation_ = std::max(deviation_, options_.min_deviation);
  }
  return Verdict::kAccepted;
}

bool RobustMean::FollowJump() {
  if (num_recent_ < kJumpWindow) return false;
  std::array<double, kJumpWindow> off;
  for (int age = 0; age < kJumpWindow; ++age) off[static_cast<size_t>(age)] = Off(age);
  std::sort(off.begin(), off.end());
  const double limit = options_.jump_deviations * deviation_;
  if (off.front() < limit && off.back() > -limit) return false;
  value_ *= std::exp(off[kJumpWindow / 2]);
  num_samples_ = num_recent_ = kJumpWindow;
  return true;
}

bool RobustMean::FollowDrift() {
  if (num_recent_ < kDriftWindow) return false;
  constexpr int kNewer = kDriftWindow / 2;
  const double clip = kClip * deviation_;
  double sum = 0, newer_sum = 0;
  for (int age = 0; age < kDriftWindow; ++age) {
    const double off = std::clamp(Off(age), -clip, clip);
    sum += off;
    if (age < kNewer) newer_sum += off;
  }
  const double limit = options_.drift_deviations * deviation_ / std::sqrt(kDriftWindow);
  if (std::abs(sum / kDriftWindow) <= limit) return false;
  // The older half may be from before.
  value_ *= std::exp(newer_sum / kNewer);
  num_samples_ = num_recent_ = kNewer;
  return true;
}

}  // namespace writescope::controller
