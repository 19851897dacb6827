// Clock: the time source that tests can replace.
#pragma once

#include <mutex>

#include "absl/time/time.h"

namespace writescope {

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() = 0;
  virtual void SleepFor(absl::Duration duration) = 0;

  // The wall clock's time at the first call and what has passed since then, so that setting the
  // clock ends no lease and no request, and makes nobody wait. Lives for ever.
  static Clock& Real();
};

// Moves only when told to; SleepFor advances it at once. Thread-safe.
class FakeClock final : public Clock {
 public:
  explicit FakeClock(absl::Time start = absl::UnixEpoch()) : now_(start) {}
  absl::Time Now() override;
  void SleepFor(absl::Duration duration) override { Advance(duration); }
  void Advance(absl::Duration duration);

 private:
  std::mutex mutex_;
  absl::Time now_;
};

}  // namespace writescope
