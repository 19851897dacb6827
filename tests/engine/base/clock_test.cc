#include "engine/base/clock.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "absl/time/clock.h"

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

TEST(RealClock, FollowsTheMachine) {
  Clock& clock = Clock::Real();
  const absl::Time start = clock.Now();
  EXPECT_LT(absl::AbsDuration(start - absl::Now()), absl::Minutes(1));
  clock.SleepFor(absl::Milliseconds(5));
  EXPECT_GE(clock.Now() - start, absl::Milliseconds(4));
}

}  // namespace
}  // namespace writescope
