#include "engine/device/cpu/thread_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"

namespace writescope::device {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(20);

TEST(ThreadQueue, RunsInOrder) {
  ThreadQueue queue("q", nullptr);
  std::vector<int> order;
  for (int i = 0; i < 1000; ++i) queue.Launch([&order, i] { order.push_back(i); });
  ASSERT_TRUE(queue.Record().Wait(kLong).ok());
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(ThreadQueue, EventsAreDoneAtTheirPoint) {
  EXPECT_TRUE(Event().Done());
  EXPECT_TRUE(Event().Wait(absl::ZeroDuration()).ok());
  ThreadQueue queue("q", nullptr);
  EXPECT_TRUE(queue.Record().Done());  // Nothing has been submitted.
  std::latch go(1);
  queue.Launch([] {});
  const Event before = queue.Record();
  queue.Launch([&] { go.wait(); });
  const Event after = queue.Record();
  ASSERT_TRUE(before.Wait(kLong).ok());
  EXPECT_FALSE(after.Done());
  const absl::Status late = after.Wait(absl::Milliseconds(20));
  EXPECT_TRUE(absl::IsDeadlineExceeded(late));
  EXPECT_THAT(std::string(late.message()), HasSubstr("ticket 2"));
  go.count_down();
  EXPECT_TRUE(after.Wait(kLong).ok());
  EXPECT_TRUE(after.Done());
}

// Longer than what a clock of 64 bits of nanoseconds can add: such a wait would be none.
TEST(ThreadQueue, AWaitOfAThousandYearsEndsWithTheWork) {
  ThreadQueue queue("test", nullptr);
  queue.Launch([] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  EXPECT_TRUE(queue.Record().Wait(absl::Hours(24 * 365 * 1000)).ok());
}

TEST(ThreadQueue, CopiesAndZeroes) {
  ThreadQueue queue("q", nullptr);
  std::vector<std::byte> from(1000, std::byte{7});
  std::vector<std::byte> to(1000, std::byte{1});
  queue.Copy(to.data(), from.data(), 900);
  queue.Zero(to.data() + 100, 50);
  ASSERT_TRUE(queue.Record().Wait(kLong).ok());
  for (size_t i = 0; i < to.size(); ++i) {
    const int want = i >= 900 ? 1 : (i >= 100 && i < 150 ? 0 : 7);
    ASSERT_EQ(static_cast<int>(to[i]), want) << i;
  }
}

TEST(ThreadQueue, ZeroesRows) {
  ThreadQueue queue("q", nullptr);
  std::vector<std::byte> to(100, std::byte{7});
  queue.ZeroRows(to.data() + 10, 3, 8, 5);
  queue.ZeroRows(to.data(), 3, 8, 0);
  ASSERT_TRUE(queue.Record().Wait(kLong).ok());
  for (int i = 0; i < 100; ++i) {
    const bool zero = i >= 10 && i < 50 && (i - 10) % 8 < 3;
    EXPECT_EQ(static_cast<int>(to[static_cast<size_t>(i)]), zero ? 0 : 7) << i;
  }
}

TEST(ThreadQueue, WaitForHoldsBackLaterWorkOnly) {
  ThreadQueue a("a", nullptr);
  ThreadQueue b("b", nullptr);
  std::latch go(1);
  std::vector<int> order;
  std::atomic<int> early{0};
  a.Launch([&] { go.wait(); });
  a.Launch([&] { order.push_back(1); });
  b.Launch([&] { early = 1; });
  const Event before = b.Record();
  b.WaitFor(a.Record());
  b.Launch([&] { order.push_back(2); });
  ASSERT_TRUE(before.Wait(kLong).ok());
  EXPECT_EQ(early, 1);
  EXPECT_FALSE(b.Record().Wait(absl::Milliseconds(20)).ok());
  a.WaitFor(b.Record());  // Neither waits for a later point of the other: no deadlock
  go.count_down();
  ASSERT_TRUE(b.Record().Wait(kLong).ok());
  ASSERT_TRUE(a.Record().Wait(kLong).ok());
  EXPECT_THAT(order, ElementsAre(1, 2));
  b.WaitFor(b.Record());  // Its own past is always there.
  ASSERT_TRUE(b.Record().Wait(kLong).ok());
}

// Through events alone, plain data passes between queues.
TEST(ThreadQueue, WaitForOrdersPlainData) {
  ThreadQueue a("a", nullptr);
  ThreadQueue b("b", nullptr);
  int value = 0;
  for (int i = 0; i < 500; ++i) {
    ThreadQueue& now = i % 2 == 0 ? a : b;
    now.WaitFor(i % 2 == 0 ? b.Record() : a.Record());
    now.Launch([&value, i] {
      if (value == i) ++value;
    });
  }
  ASSERT_TRUE(b.Record().Wait(kLong).ok());
  EXPECT_EQ(value, 500);
}

TEST(ThreadQueue, FlagsPassDataToPollers) {
  ThreadQueue queue("q", nullptr);
  std::atomic<uint64_t> flag{0};
  std::atomic<uint64_t> back{0};
  int payload = 0;
  int answer = 0;
  queue.Launch([&] { payload = 42; });
  queue.SetFlag(&flag, 7);
  queue.WaitFlag(&back, 3, kLong, nullptr);
  queue.Launch([&] { ++answer; });
  while (flag.load(std::memory_order_acquire) < 7) std::this_thread::yield();
  EXPECT_EQ(payload, 42);
  answer = 10;
  back.store(2, std::memory_order_release);
  EXPECT_FALSE(queue.Record().Wait(absl::Milliseconds(10)).ok());  // Not yet the value
  back.store(5, std::memory_order_release);                        // At least the value
  ASSERT_TRUE(queue.Record().Wait(kLong).ok());
  EXPECT_EQ(answer, 11);
  EXPECT_TRUE(queue.TakeError().ok());
}

TEST(ThreadQueue, LostFlagIsOneErrorAndWaitsDoNotAddUp) {
  ThreadQueue queue("q", nullptr);
  std::atomic<uint64_t> flag{0};
  const absl::Duration limit = absl::Milliseconds(100);
  const absl::Time start = absl::Now();
  bool later_ran = false;
  for (int i = 0; i < 20; ++i) queue.WaitFlag(&flag, 1, limit, nullptr);
  queue.Launch([&] { later_ran = true; });
  ASSERT_TRUE(queue.Record().Wait(kLong).ok());
  const absl::Duration took = absl::Now() - start;
  EXPECT_GE(took, limit * 0.9);
  EXPECT_LT(took, limit * 10) << "20 waits took one after another";
  EXPECT_TRUE(later_ran);
  EXPECT_TRUE(queue.failed());
  const absl::Status error = queue.TakeError();
  EXPECT_TRUE(absl::IsDeadlineExceeded(error)) << error;
  EXPECT_THAT(std::string(error.message()), HasSubstr("queue q waited 100ms"));
  EXPECT_TRUE(queue.TakeError().ok());  // Given once.
  EXPECT_FALSE(queue.failed());
  // Afterwards waits wait again, and fail again.
  queue.WaitFlag(&flag, 1, absl::Milliseconds(10), nullptr);
  ASSERT_TRUE(queue.Record().Wait(kLong).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(queue.TakeError()));
  flag = 1;
  queue.WaitFlag(&flag, 1, absl::Milliseconds(10), nullptr);
  ASSERT_TRUE(queue.Record().Wait(kLong).ok());
  EXPECT_TRUE(queue.TakeError().ok());
}

TEST(ThreadQueue, AWaitTellsWhenItSawTheFlagOrGaveUp) {
  ThreadQueue queue("q", nullptr);
  std::atomic<uint64_t> flag{0};
  WaitTimes times;
  const double submitted_s = NowSeconds();
  queue.WaitFlag(&flag, 1, kLong, &times);
  const Event behind = queue.Record();
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const double set_s = NowSeconds();
  flag.store(1, std::memory_order_release);
  ASSERT_TRUE(behind.Wait(kLong).ok());
  EXPECT_GE(times.began_s, submitted_s);
  EXPECT_LT(times.began_s, set_s);
  EXPECT_GE(times.seen_s, set_s);
  EXPECT_LE(times.seen_s, NowSeconds());
  const double before_s = NowSeconds();
  queue.WaitFlag(&flag, 2, absl::Milliseconds(20), &times);
  ASSERT_TRUE(queue.Record().Wait(kLong).ok());
  EXPECT_GE(times.seen_s, before_s + 0.02);
  EXPECT_LE(times.seen_s, NowSeconds());
  EXPECT_TRUE(absl::IsDeadlineExceeded(queue.TakeError()));
}

TEST(ThreadQueue, RecordedTimesRiseInOrder) {
  ThreadQueue queue("q", nullptr);
  double times[3] = {};
  const double before = NowSeconds();
  queue.RecordTime(&times[0]);
  queue.Launch([] { absl::SleepFor(absl::Milliseconds(5)); });
  queue.RecordTime(&times[1]);
  queue.RecordTime(&times[2]);
  ASSERT_TRUE(queue.Record().Wait(kLong).ok());
  EXPECT_GE(times[0], before);
  EXPECT_GE(times[1] - times[0], 0.004);
  EXPECT_GE(times[2], times[1]);
  EXPECT_LE(times[2], NowSeconds());
}

// What a closure holds is gone once its ticket is done, so that a waiter may reuse it.
TEST(ThreadQueue, ClosureDiesBeforeItsTicket) {
  ThreadQueue queue("q", nullptr);
  for (int i = 0; i < 200; ++i) {
    auto held = std::make_shared<int>(i);
    std::weak_ptr<int> watch = held;
    queue.Launch([held = std::move(held)] { (void)*held; });
    ASSERT_TRUE(queue.Record().Wait(kLong).ok());
    ASSERT_TRUE(watch.expired());
  }
}

TEST(ThreadQueue, EndsAfterItsWork) {
  std::atomic<int> done{0};
  {
    ThreadQueue queue("q", nullptr);
    for (int i = 0; i < 100; ++i) queue.Launch([&] { ++done; });
  }
  EXPECT_EQ(done, 100);
}

}  // namespace
}  // namespace writescope::device
