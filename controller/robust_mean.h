// RobustMean: a moving mean of positive numbers that a wild value hardly moves, that averages noise
// away, and that still follows a real change within a few samples. It learns how noisy its samples
// are, and takes for a change what such noise does not explain. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>

namespace writescope::controller {

class RobustMean {
 public:
  struct Options {
    // Weight of a new sample once warm: 10 % noise gets through as 1.6 %.
    double weight = 0.05;
    // Three samples in a row this many deviations off, on one side, are a jump.
    double jump_deviations = 2.5;
    // A mean of eight that is off by this many of its own deviations is a drift.
    double drift_deviations = 4;
    // Deviation of the logarithms: assumed at first, and never believed to be less than.
    double first_deviation = 0.1;
    double min_deviation = 0.01;
  };
  // kRefused: not a positive finite number. kChanged: a jump or a drift was noticed.
  enum class Verdict { kAccepted, kChanged, kRefused };

  RobustMean() : RobustMean(Options()) {}
  explicit RobustMean(const Options& options);

  // A guess that the first sample replaces.
  void Seed(double value);

  Verdict Add(double sample);

  // 0 before the first sample and without a seed.
  double value() const { return value_; }
  bool measured() const { return num_samples_ > 0; }
  // Relative noise of the samples.
  double deviation() const { return deviation_; }

  // Moves the mean by a factor, for a reason other than a sample.
  void Scale(double factor);

 private:
  static constexpr int kJumpWindow = 3;
  static constexpr int kDriftWindow = 8;

  // Natural logarithm of the sample that came `age` samples ago over the mean as it is now.
  double Off(int age) const;
  bool FollowJump();
  bool FollowDrift();

  Options options_;
  double value_ = 0;
  double deviation_;
  // Counts up to where `weight` takes over from 1 / n; starts again after a change.
  int num_samples_ = 0;
  std::array<double, kDriftWindow> recent_ = {};  // Logarithms, a ring.
  size_t next_ = 0;
  int num_recent_ = 0;  // Since the last change.
};

}  // namespace writescope::controller
