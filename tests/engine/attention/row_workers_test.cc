#include "engine/attention/row_workers.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <bit>
#include <thread>
#include <vector>

namespace writescope::attention {
namespace {

void ExpectExit(RowWorkers::Exit got, bool leaves, uint64_t taken) {
  EXPECT_EQ(got.leaves, leaves);
  EXPECT_EQ(got.taken, taken);
}

TEST(RowWorkers, WhoExitsWhileOthersAttendLeavesAndTheLastTakes) {
  RowWorkers row;
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(row.Enter(7));
  ExpectExit(row.Leave(7, 3, true), true, 0);
  ExpectExit(row.Leave(7, 0, true), true, 0);
  // Two are enough for one worker.
  ExpectExit(row.Leave(7, 1, true), false, 0b1001);
  ExpectExit(row.Leave(7, 39, true), true, 0);
  ExpectExit(row.Leave(7, 2, true), false, uint64_t{1} << 39);
}

TEST(RowWorkers, SomeAreNotToLeave) {
  RowWorkers row;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(row.Enter(0));
  ExpectExit(row.Leave(0, 1, false), false, 0);
  ExpectExit(row.Leave(0, RowWorkers::kMaxWorkers, true), false, 0);
  ExpectExit(row.Leave(0, 2, true), false, 0);  // There is nobody to leave to.
}

TEST(RowWorkers, OfAnotherTurnNobodyEntersBeforeAllHaveLeft) {
  RowWorkers row;
  ASSERT_TRUE(row.Enter(1));
  EXPECT_FALSE(row.Enter(2));
  ExpectExit(row.Leave(1, 0, true), false, 0);
  EXPECT_TRUE(row.Enter(2));
  row.Clear();
  EXPECT_TRUE(row.Enter(0));
}

// What each has goes to exactly one, and nothing is left at the end.
TEST(RowWorkers, NothingIsLostOrTakenTwice) {
  constexpr int kWorkers = 4;
  constexpr int kTurns = 500;
  RowWorkers row;
  std::array<int64_t, kWorkers> left = {};  // Written by who leaves, read by who takes
  std::atomic<int64_t> merged{0};
  std::atomic<int> begun{0};
  std::vector<std::thread> threads;
  for (int worker = 0; worker < kWorkers; ++worker) {
    threads.emplace_back([&, worker] {
      for (int turn = 0; turn < kTurns; ++turn) {
        ASSERT_TRUE(row.Enter(turn));
        // All of a turn have entered before one exits, and all have exited before the next one.
        begun.fetch_add(1);
        while (begun.load() < (2 * turn + 1) * kWorkers) std::this_thread::yield();
        left[static_cast<size_t>(worker)] = 1;
        const RowWorkers::Exit exit = row.Leave(turn, worker, true);
        int64_t mine = exit.leaves ? 0 : 1;
        for (uint64_t taken = exit.taken; taken != 0; taken &= taken - 1) {
          int64_t& of_other = left[static_cast<size_t>(std::countr_zero(taken))];
          mine += of_other;
          of_other = 0;
        }
        merged.fetch_add(mine);
        begun.fetch_add(1);
        while (begun.load() < (2 * turn + 2) * kWorkers) std::this_thread::yield();
        ASSERT_EQ(merged.load(), int64_t{turn + 1} * kWorkers);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(RowWorkers, MoreThanCanBeCountedAreOnTheirOwn) {
  RowWorkers row;
  row.Clear();
  for (int worker = 0; worker < RowWorkers::kMaxCount; ++worker) ASSERT_TRUE(row.Enter(3));
  EXPECT_FALSE(row.Enter(3));
}

}  // namespace
}  // namespace writescope::attention
