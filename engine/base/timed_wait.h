// Waiting on a condition variable for an absl::Duration.
#pragma once

#include <condition_variable>
#include <mutex>

#include "absl/time/time.h"

namespace writescope {

// Waits until `ready()`, at most `timeout`, which may be infinite; whether it is ready. `lock` is
// held when `ready` is called.
template <typename Ready>
bool TimedWait(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
               absl::Duration timeout, const Ready& ready) {
  // From here on a timeout is none: a point in time that far off would overflow the clock.
  constexpr absl::Duration kLongest = absl::Hours(24 * 365);
  if (timeout < kLongest) {
    return condition.wait_for(lock, absl::ToChronoNanoseconds(timeout), ready);
  }
  condition.wait(lock, ready);
  return true;
}

}  // namespace writescope
