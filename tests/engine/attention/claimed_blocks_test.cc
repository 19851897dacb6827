#include "engine/attention/claimed_blocks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace writescope::attention {
namespace {

using Range = ClaimedBlocks::Range;

void ExpectRange(Range got, int64_t first, int64_t count) {
  EXPECT_EQ(got.count, count);
  if (count > 0) {
    EXPECT_EQ(got.first, first);
  }
}

TEST(ClaimedBlocks, TheOwnerTakesFromTheBeginOthersFromTheEnd) {
  ClaimedBlocks claimed;
  claimed.Set(3, {100, 40});
  ExpectRange(claimed.TakeFirst(3, 1, 8), 100, 8);
  ExpectRange(claimed.TakeLast(3, 1), 124, 16);
  ExpectRange(claimed.left(3), 108, 16);
  ExpectRange(claimed.TakeFirst(3, 1, 100), 108, 8);  // Half, so that others find some
  ExpectRange(claimed.TakeLast(3, 9), 0, 0);          // Too few for who wants nine
  ExpectRange(claimed.TakeFirst(3, 7, 3), 116, 7);    // The least counts before the most
  ExpectRange(claimed.TakeLast(3, 1), 123, 1);
  ExpectRange(claimed.TakeLast(3, 1), 0, 0);
  ExpectRange(claimed.TakeFirst(3, 1, 1), 0, 0);
}

TEST(ClaimedBlocks, OfAnotherTurnThereIsNothing) {
  ClaimedBlocks claimed;
  ExpectRange(claimed.left(0), 0, 0);
  claimed.Set(1, {0, 4});
  for (const int turn : {0, 2}) {
    ExpectRange(claimed.left(turn), 0, 0);
    ExpectRange(claimed.TakeFirst(turn, 1, 4), 0, 0);
    ExpectRange(claimed.TakeLast(turn, 1), 0, 0);
  }
  ExpectRange(claimed.left(1), 0, 4);
  claimed.Clear();
  ExpectRange(claimed.left(1), 0, 0);
}

TEST(ClaimedBlocks, TheLargestListPacksWithoutCarry) {
  ClaimedBlocks claimed;
  const int turn = ClaimedBlocks::kMaxTurns - 1;
  const int64_t last = ClaimedBlocks::kMaxBlocks - 1;
  claimed.Set(turn, {last - 2, 2});
  ExpectRange(claimed.TakeLast(turn, 1), last - 1, 1);
  ExpectRange(claimed.left(turn), last - 2, 1);
  claimed.Set(turn, {0, last});
  ExpectRange(claimed.TakeLast(turn, 1), last / 2, last / 2 + 1);
  EXPECT_DEATH(claimed.Set(turn, {last, 1}), "blocks from");
  EXPECT_DEATH(claimed.Set(turn + 1, {0, 1}), "turn 65536");
}

// One worker has claimed all; the others take from it and from each other: every block once a turn.
TEST(ClaimedBlocks, EveryBlockOnceWhoeverTakesIt) {
  constexpr int kWorkers = 3;
  constexpr int kTurns = 20000;
  constexpr int64_t kBlocks = 60;
  std::vector<ClaimedBlocks> claimed(kWorkers);
  std::vector<std::atomic<int>> taken(kBlocks);
  std::atomic<int> begun{0};
  std::vector<std::thread> threads;
  for (int worker = 0; worker < kWorkers; ++worker) {
    threads.emplace_back([&, worker] {
      ClaimedBlocks& mine = claimed[static_cast<size_t>(worker)];
      for (int turn = 0; turn < kTurns; ++turn) {
        if (worker == turn % kWorkers) mine.Set(turn, {0, kBlocks});
        // Else the first would be done before the last is there.
        begun.fetch_add(1);
        while (begun.load() < (turn + 1) * kWorkers) std::this_thread::yield();
        while (true) {
          const Range now = mine.TakeFirst(turn, 1, 1);
          for (int64_t i = now.first; i < now.first + now.count; ++i) {
            taken[static_cast<size_t>(i)].fetch_add(1, std::memory_order_relaxed);
          }
          if (now.count > 0) continue;
          Range got;
          for (int i = 1; i < kWorkers && got.count == 0; ++i) {
            got = claimed[static_cast<size_t>((worker + i) % kWorkers)].TakeLast(turn, 1);
          }
          if (got.count == 0) break;
          mine.Set(turn, got);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::atomic<int>& times : taken) ASSERT_EQ(times, kTurns);
}

}  // namespace
}  // namespace writescope::attention
