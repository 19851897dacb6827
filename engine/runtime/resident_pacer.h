// How much of a hybrid step's time goes to resident sequences that step inside it.
#pragma once

namespace writescope::runtime {

// Seconds of one clock. A hybrid step waits for memory most of its time, so that resident steps
// cost it little; what they cost is bounded: they take at most six tenths of the time.
class ResidentPacer {
 public:
  static constexpr double kFraction = 0.6;

  explicit ResidentPacer(double hybrid_began_s) : hybrid_began_s_(hybrid_began_s) {}
  bool MayStep(double now_s) const { return spent_s_ <= kFraction * (now_s - hybrid_began_s_); }
  void AddStep(double seconds) {
    spent_s_ += seconds;
    ++num_steps_;
  }
  double spent_s() const { return spent_s_; }
  int num_steps() const { return num_steps_; }

 private:
  const double hybrid_began_s_;
  double spent_s_ = 0;
  int num_steps_ = 0;
};

}  // namespace writescope::runtime
