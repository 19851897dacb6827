#include "engine/base/clock.h"

#include <chrono>

#include "absl/time/clock.h"

namespace writescope {
namespace {

class RealClock final : public Clock {
 public:
  absl::Time Now() override {
    return start_ + absl::FromChrono(std::chrono::steady_clock::now() - steady_start_);
  }
  void SleepFor(absl::Duration duration) override { absl::SleepFor(duration); }

 private:
  const absl::Time start_ = absl::Now();
  const std::chrono::steady_clock::time_point steady_start_ = std::chrono::steady_clock::now();
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
