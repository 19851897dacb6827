#include "engine/base/clock.h"

#include "absl/time/clock.h"

namespace writescope {
namespace {

class RealClock final : public Clock {
 public:
  absl::Time Now() override { return absl::Now(); }
  void SleepFor(absl::Duration duration) override { absl::SleepFor(duration); }
};

}  // namespace

Clock& Clock::Real() {
  static RealClock* clock = new RealClock;  // Never destroyed: threads may outlive static objects.
  return *clock;
}

absl::Time FakeClock::Now() {
  std::lock_guard lock(mutex_);
  return now_;
}

void FakeClock::Advance(absl::Duration duration) {
  std::lock_guard lock(mutex_);
  now_ += duration;
}

}  // namespace writescope
