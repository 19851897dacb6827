#include "engine/base/timed_wait.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "absl/time/clock.h"

namespace writescope {
namespace {

TEST(WaitLimitTest, EndsAfterItsTime) {
  WaitLimit limit(absl::Seconds(2), 100);
  double now_s = 100;
  for (int look = 1; look <= 80; ++look) EXPECT_FALSE(limit.Passed(now_s += 0.0249)) << look;
  EXPECT_TRUE(limit.Passed(now_s += 0.0249));
}

TEST(WaitLimitTest, APauseOfTheProcessDoesNotCount) {
  WaitLimit limit(absl::Seconds(2), 100);
  EXPECT_FALSE(limit.Passed(101000));
  EXPECT_FALSE(limit.Passed(202000));
  double now_s = 202000;
  int looks = 0;
  while (!limit.Passed(now_s += 0.01)) ++looks;
  EXPECT_NEAR(looks, 190, 1);
}

TEST(WaitLimitTest, NoLimitNeverPasses) {
  WaitLimit limit(absl::InfiniteDuration(), 0);
  for (double now_s = 1; now_s < 1e9; now_s *= 2) EXPECT_FALSE(limit.Passed(now_s));
}

// Two threads, of which one waits for the other. The exit code: whether that was in time.
[[noreturn]] void WaitForAThread() {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::thread other([&] {
    for (int i = 0; i < 30; ++i) absl::SleepFor(absl::Milliseconds(10));
    std::lock_guard lock(mutex);
    done = true;
    changed.notify_all();
  });
  bool in_time = false;
  {
    std::unique_lock lock(mutex);
    in_time = TimedWait(changed, lock, absl::Milliseconds(800), [&] { return done; });
  }
  other.join();
  _exit(in_time ? 0 : 1);
}

TEST(TimedWaitTest, AProcessThatWasStoppedGoesOn) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) WaitForAThread();
  absl::SleepFor(absl::Milliseconds(100));
  ASSERT_EQ(kill(child, SIGSTOP), 0);
  absl::SleepFor(absl::Milliseconds(1200));
  ASSERT_EQ(kill(child, SIGCONT), 0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(TimedWaitTest, EndsAfterItsTime) {
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_lock lock(mutex);
  for (const absl::Duration timeout : {absl::ZeroDuration(), absl::Milliseconds(120)}) {
    const absl::Time begin = absl::Now();
    EXPECT_FALSE(TimedWait(changed, lock, timeout, [] { return false; }));
    EXPECT_GE(absl::Now() - begin, timeout);
    EXPECT_LT(absl::Now() - begin, timeout + absl::Seconds(5));
  }
}

}  // namespace
}  // namespace writescope
