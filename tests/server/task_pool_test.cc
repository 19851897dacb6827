#include "server/task_pool.h"

#include <gtest/gtest.h>

#include <atomic>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace writescope::server {
namespace {

TEST(TaskPool, ShortPromptsDoNotWaitForLongOnes) {
  absl::Notification small_ran;
  absl::Notification go_on;
  std::atomic<int> large_running{0};
  std::atomic<int> most_large{0};
  std::atomic<int> large_done{0};
  {
    TaskPool pool(/*num_threads=*/2, /*max_waiting=*/8);
    for (int i = 0; i < 4; ++i) {
      ASSERT_TRUE(pool.Run(kLargeMessageBytes, [&] {
        const int running = ++large_running;
        if (running > most_large) most_large = running;
        go_on.WaitForNotification();
        --large_running;
        ++large_done;
      }));
    }
    ASSERT_TRUE(pool.Run(kLargeMessageBytes - 1, [&] { small_ran.Notify(); }));
    EXPECT_TRUE(small_ran.WaitForNotificationWithTimeout(absl::Seconds(20)));
    go_on.Notify();
    pool.Stop();
    EXPECT_FALSE(pool.Run(0, [] {}));
    EXPECT_FALSE(pool.Run(kLargeMessageBytes, [] {}));
  }
  EXPECT_EQ(large_done, 4);
  EXPECT_EQ(most_large, 1);  // Their memory is taken once.
}

}  // namespace
}  // namespace writescope::server
