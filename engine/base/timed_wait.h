// Waits that end: on a condition variable for an absl::Duration, or by looking again and again.
//
// Time counts only while the process runs. One that was stopped as a whole (by a debugger, a frozen
// container, a machine that slept) finds the clock far ahead and its other threads no further than
// before: what it waits for is not late.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/time/time.h"

namespace writescope {

// The limit of one wait, for a thread that looks again and again. May be infinite.
class WaitLimit {
 public:
  // `now_s` is of a clock that never goes back.
  WaitLimit(absl::Duration limit, double now_s)
      : left_s_(absl::ToDoubleSeconds(limit)), last_look_s_(now_s) {}

  // To be asked often: what lies between two looks counts as kLongestLookSeconds at most.
  bool Passed(double now_s) {
    left_s_ -= std::min(now_s - last_look_s_, kLongestLookSeconds);
    last_look_s_ = now_s;
    return left_s_ < 0;
  }

 private:
  static constexpr double kLongestLookSeconds = 0.05;

  double left_s_;
  double last_look_s_;
};

// Waits until `ready()`, at most `timeout`, which may be infinite; whether it is ready. `lock` is
// held when `ready` is called.
template <typename Ready>
bool TimedWait(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
               absl::Duration timeout, const Ready& ready) {
  // From here on a timeout is none: a point in time that far off would overflow the clock.
  constexpr absl::Duration kLongest = absl::Hours(24 * 365);
  if (timeout >= kLongest) {
    condition.wait(lock, ready);
    return true;
  }
  // A part that takes longer than it should counts as what it should take.
  constexpr std::chrono::nanoseconds kPart = std::chrono::milliseconds(50);
  using Clock = std::chrono::steady_clock;
  std::chrono::nanoseconds left = absl::ToChronoNanoseconds(timeout);
  while (!ready()) {
    if (left <= std::chrono::nanoseconds::zero()) return false;
    const std::chrono::nanoseconds part = std::min(left, kPart);
    const Clock::time_point begin = Clock::now();
    condition.wait_for(lock, part);
    left -= std::min<std::chrono::nanoseconds>(Clock::now() - begin, part);
  }
  return true;
}

}  // namespace writescope
