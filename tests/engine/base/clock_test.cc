#include "engine/base/clock.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <thread>
#include <vector>

#include "absl/time/clock.h"

namespace {
std::atomic<int> wall_clock_offset_s{0};
}  // namespace

// In place of the C library's, for this program and the libraries it uses: the wall clock can be
// set.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const int result = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME) time->tv_sec += wall_clock_offset_s.load();
  return result;
}

namespace writescope {
namespace {

TEST(FakeClock, MovesOnlyWhenTold) {
  FakeClock clock(absl::FromUnixSeconds(100));
  EXPECT_EQ(clock.Now(), absl::FromUnixSeconds(100));
  EXPECT_EQ(clock.Now(), absl::FromUnixSeconds(100));
  clock.Advance(absl::Seconds(5));
  EXPECT_EQ(clock.Now(), absl::FromUnixSeconds(105));
  const absl::Time before = absl::Now();
  clock.SleepFor(absl::Hours(24));
  EXPECT_LT(absl::Now() - before, absl::Hours(1));
  EXPECT_EQ(clock.Now(), absl::FromUnixSeconds(105) + absl::Hours(24));
}

TEST(FakeClock, AddsUpOverThreads) {
  FakeClock clock;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) clock.Advance(absl::Nanoseconds(3));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(clock.Now(), absl::UnixEpoch() + absl::Nanoseconds(12000));
}

TEST(RealClock, GoesOnEvenlyWhereTheWallClockIsSet) {
  Clock& clock = Clock::Real();
  const absl::Time start = clock.Now();
  const absl::Time wall_start = absl::Now();
  wall_clock_offset_s = -3600;
  const absl::Duration passed = clock.Now() - start;
  const absl::Duration wall_passed = absl::Now() - wall_start;
  wall_clock_offset_s = 0;
  EXPECT_LT(wall_passed, absl::Minutes(-59));
  EXPECT_GE(passed, absl::ZeroDuration());
  EXPECT_LT(passed, absl::Minutes(1));
}

TEST(RealClock, FollowsTheMachine) {
  Clock& clock = Clock::Real();
  const absl::Time start = clock.Now();
  EXPECT_LT(absl::AbsDuration(start - absl::Now()), absl::Minutes(1));
  clock.SleepFor(absl::Milliseconds(5));
  EXPECT_GE(clock.Now() - start, absl::Milliseconds(4));
}

}  // namespace
}  // namespace writescope
