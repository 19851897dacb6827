#include "engine/base/bounded_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"

namespace writescope {
namespace {

TEST(BoundedQueue, KeepsOrderAndLimit) {
  BoundedQueue<int> queue(3);
  EXPECT_EQ(queue.limit(), 3u);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(queue.TryPush(int{i}));
  EXPECT_FALSE(queue.TryPush(3));
  EXPECT_EQ(queue.size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(queue.empty());
    EXPECT_EQ(queue.Pop(), i);
    EXPECT_EQ(queue.size(), static_cast<size_t>(2 - i));
  }
  EXPECT_TRUE(queue.empty());
  EXPECT_EQ(queue.Pop(absl::ZeroDuration()), std::nullopt);
  EXPECT_TRUE(queue.Push(4));
  EXPECT_EQ(queue.size(), 1u);
}

TEST(BoundedQueue, RefusedItemStaysWithItsOwner) {
  BoundedQueue<std::unique_ptr<int>> queue(1);
  EXPECT_TRUE(queue.TryPush(std::make_unique<int>(1)));
  auto second = std::make_unique<int>(2);
  EXPECT_FALSE(queue.TryPush(std::move(second)));
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(*second, 2);
}

TEST(BoundedQueue, CloseKeepsWhatIsInside) {
  BoundedQueue<int> queue(4);
  EXPECT_TRUE(queue.Push(1));
  EXPECT_TRUE(queue.Push(2));
  EXPECT_FALSE(queue.closed());
  queue.Close();
  EXPECT_TRUE(queue.closed());
  EXPECT_FALSE(queue.Push(3));
  EXPECT_FALSE(queue.TryPush(3));
  EXPECT_EQ(queue.Pop(), 1);
  EXPECT_EQ(queue.Pop(), 2);
  EXPECT_EQ(queue.Pop(), std::nullopt);  // Without a limit, and yet at once
}

TEST(BoundedQueue, PopTimesOut) {
  BoundedQueue<int> queue(1);
  const absl::Time start = absl::Now();
  EXPECT_EQ(queue.Pop(absl::Milliseconds(20)), std::nullopt);
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(19));
}

TEST(BoundedQueue, CloseWakesWaiters) {
  BoundedQueue<int> empty(1);
  BoundedQueue<int> full(1);
  ASSERT_TRUE(full.Push(1));
  std::atomic<int> woken{0};
  std::thread popper([&] { woken += empty.Pop() == std::nullopt; });
  std::thread pusher([&] { woken += !full.Push(2); });
  absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(woken, 0);
  empty.Close();
  full.Close();
  popper.join();
  pusher.join();
  EXPECT_EQ(woken, 2);
}

TEST(BoundedQueue, RoomWakesAPusher) {
  BoundedQueue<int> queue(1);
  ASSERT_TRUE(queue.Push(1));
  std::thread pusher([&] { EXPECT_TRUE(queue.Push(2)); });
  EXPECT_EQ(queue.Pop(), 1);
  EXPECT_EQ(queue.Pop(), 2);
  pusher.join();
}

TEST(BoundedQueue, ManyThreadsLoseAndDoubleNothing) {
  constexpr int kThreads = 4;
  constexpr int kItems = 2000;
  BoundedQueue<int> queue(5);
  std::vector<std::atomic<int>> seen(kThreads * kItems);
  std::vector<std::thread> producers;
  std::vector<std::thread> consumers;
  std::atomic<bool> in_order{true};
  for (int p = 0; p < kThreads; ++p) {
    producers.emplace_back([&, p] {
      for (int i = 0; i < kItems; ++i) {
        int item = p * kItems + i;
        if (i % 2 == 0) {
          ASSERT_TRUE(queue.Push(item));
        } else {
          while (!queue.TryPush(std::move(item))) std::this_thread::yield();
        }
      }
    });
    consumers.emplace_back([&] {
      std::vector<int> last(kThreads, -1);
      while (const std::optional<int> item = queue.Pop()) {
        // One producer's items pass in the order in which they came.
        if (*item <= last[*item / kItems]) in_order = false;
        last[*item / kItems] = *item;
        ++seen[*item];
      }
    });
  }
  for (std::thread& thread : producers) thread.join();
  queue.Close();
  for (std::thread& thread : consumers) thread.join();
  EXPECT_TRUE(in_order);
  for (const std::atomic<int>& count : seen) EXPECT_EQ(count, 1);
}

}  // namespace
}  // namespace writescope
