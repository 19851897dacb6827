#include "engine/attention/meet_cursor.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "engine/attention/link_pump.h"
#include "tests/support/seed.h"

namespace writescope::attention {
namespace {

using testing_support::TestSeed;

// Every order of claims of one and two blocks from both ends of a short list.
void ClaimEverything(int64_t num_blocks, int64_t cut, std::vector<int>& moves) {
  MeetCursor cursor;
  cursor.Reset(num_blocks, cut);
  std::vector<int> owner(static_cast<size_t>(num_blocks), 0);
  int64_t front = 0;
  int64_t back = 0;
  for (const int move : moves) {
    const bool from_front = move % 2 == 0;
    const MeetCursor::Claim claim =
        from_front ? cursor.ClaimFront(1 + move / 2) : cursor.ClaimBack(1 + move / 2);
    ASSERT_LE(claim.count, 1 + move / 2);
    for (int64_t i = claim.first; i < claim.first + claim.count; ++i) {
      ASSERT_EQ(owner[static_cast<size_t>(i)], 0) << "block " << i << " claimed twice";
      owner[static_cast<size_t>(i)] = from_front ? 1 : 2;
      if (cut >= 0) {
        ASSERT_EQ(i < cut, from_front) << "block " << i << ", cut " << cut;
      }
    }
    (from_front ? front : back) += claim.count;
    ASSERT_EQ(cursor.front(), front);
    ASSERT_EQ(cursor.back(), back);
    ASSERT_EQ(cursor.remaining(), num_blocks - front - back);
    ASSERT_EQ(cursor.exhausted(), front + back == num_blocks);
  }
  // What is left goes to both sides until neither gets more; then every block has an owner.
  while (cursor.ClaimFront(1).count > 0 || cursor.ClaimBack(1).count > 0) {
  }
  ASSERT_TRUE(cursor.exhausted());
  for (int64_t i = 0; i < num_blocks; ++i) {
    if (owner[static_cast<size_t>(i)] != 0) {
      ASSERT_EQ(owner[static_cast<size_t>(i)], i < front ? 1 : 2);
    }
  }
}

TEST(MeetCursor, EveryOrderOfClaimsOnShortLists) {
  for (int64_t num_blocks = 0; num_blocks <= 5; ++num_blocks) {
    for (int64_t cut = -1; cut <= num_blocks; ++cut) {
      std::vector<int> moves;
      const std::function<void(int)> extend = [&](int depth) {
        ClaimEverything(num_blocks, cut, moves);
        if (depth == 0 || ::testing::Test::HasFatalFailure()) return;
        for (int move = 0; move < 4; ++move) {
          moves.push_back(move);
          extend(depth - 1);
          moves.pop_back();
        }
      };
      extend(5);
    }
  }
}

TEST(MeetCursor, AClaimOfNothingWantsNothing) {
  MeetCursor cursor;
  cursor.Reset(3);
  EXPECT_EQ(cursor.ClaimFront(0).count, 0);
  EXPECT_EQ(cursor.ClaimBack(0).count, 0);
  EXPECT_EQ(cursor.remaining(), 3);
  cursor.Reset(0);
  EXPECT_TRUE(cursor.exhausted());
  EXPECT_EQ(cursor.ClaimFront(5).count, 0);
  EXPECT_EQ(cursor.ClaimBack(5).count, 0);
}

TEST(MeetCursor, LargeListsPackWithoutCarry) {
  MeetCursor cursor;
  const int64_t num_blocks = int64_t{1} << 31;
  cursor.Reset(num_blocks);
  EXPECT_EQ(cursor.ClaimBack(num_blocks - 5).count, num_blocks - 5);
  EXPECT_EQ(cursor.ClaimFront(100).count, 5);
  EXPECT_EQ(cursor.front(), 5);
  EXPECT_EQ(cursor.back(), num_blocks - 5);
}

class MeetCursorThreadsTest : public ::testing::TestWithParam<int64_t> {};

// One pump and several workers at once: every block is claimed once, and a planned cut holds.
TEST_P(MeetCursorThreadsTest, EveryBlockOnce) {
  constexpr int64_t kBlocks = 3000;
  constexpr int kWorkers = 4;
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 10; ++round) {
    MeetCursor cursor;
    const int64_t cut = GetParam();
    cursor.Reset(kBlocks, cut);
    std::vector<std::atomic<int>> owners(kBlocks);
    std::atomic<bool> cut_respected{true};
    const auto claim_all = [&](bool front, uint64_t seed) {
      std::mt19937_64 own(seed);
      while (true) {
        const int64_t wanted = 1 + static_cast<int64_t>(own() % 7);
        const MeetCursor::Claim claim =
            front ? cursor.ClaimFront(wanted) : cursor.ClaimBack(wanted);
        if (claim.count == 0) return;
        for (int64_t i = claim.first; i < claim.first + claim.count; ++i) {
          owners[static_cast<size_t>(i)].fetch_add(1, std::memory_order_relaxed);
          if (cut >= 0 && (i < cut) != front) cut_respected = false;
        }
      }
    };
    std::vector<std::thread> threads;
    threads.emplace_back(claim_all, true, random());
    for (int w = 0; w < kWorkers; ++w) threads.emplace_back(claim_all, false, random());
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(cursor.exhausted());
    EXPECT_TRUE(cut_respected);
    for (const std::atomic<int>& times : owners) ASSERT_EQ(times, 1);
    if (cut >= 0) {
      EXPECT_EQ(cursor.front(), cut);
      EXPECT_EQ(cursor.back(), kBlocks - cut);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Cuts, MeetCursorThreadsTest, ::testing::Values(-1, 0, 1, 1700, 3000));

TEST(LinkPumpTest, ClaimsShrinkOnlyWhereTheCpuClaimsToo) {
  MeetCursor cursor;
  cursor.Reset(100);
  const auto next = [&] {
    return LinkPump::ClaimBlocks(cursor, {.slot_blocks = 16, .smallest = 2, .cpu_reserve = 0});
  };
  EXPECT_EQ(next(), 16);  // The CPU is not there yet.
  cursor.ClaimFront(60);
  EXPECT_EQ(next(), 16);
  cursor.ClaimBack(4);
  EXPECT_EQ(next(), 4);  // An eighth of 36
  cursor.ClaimFront(28);
  EXPECT_EQ(next(), 2);
  EXPECT_EQ(LinkPump::ClaimBlocks(cursor, {.slot_blocks = 1, .smallest = 2, .cpu_reserve = 0}), 1);
}

TEST(LinkPumpTest, LeavesTheReserveToTheCpu) {
  MeetCursor cursor;
  cursor.Reset(100);
  const auto next = [&] {
    return LinkPump::ClaimBlocks(cursor, {.slot_blocks = 16, .smallest = 2, .cpu_reserve = 10});
  };
  EXPECT_EQ(next(), 16);
  cursor.ClaimFront(80);
  EXPECT_EQ(next(), 10);  // Also before the CPU is there
  cursor.ClaimBack(4);
  EXPECT_EQ(next(), 2);
  cursor.ClaimFront(5);
  EXPECT_EQ(next(), 1);
  cursor.ClaimFront(1);
  EXPECT_EQ(next(), 0);
  cursor.ClaimBack(8);  // Of the reserve itself
  EXPECT_EQ(next(), 0);
}

}  // namespace
}  // namespace writescope::attention
