#include "engine/base/parallel_for.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

namespace writescope {
namespace {

class ParallelForTest : public ::testing::TestWithParam<int> {};

TEST_P(ParallelForTest, EveryItemOnceByAKnownThread) {
  ParallelFor team(GetParam());
  EXPECT_EQ(team.num_threads(), GetParam());
  for (const int64_t count : {0, 1, 2, 3, 7, 64, 1000}) {
    std::vector<std::atomic<int>> done(static_cast<size_t>(count));
    std::atomic<bool> known{true};
    team.Run(count, [&](int64_t item, int thread) {
      if (thread < 0 || thread >= GetParam()) known = false;
      ++done[static_cast<size_t>(item)];
    });
    EXPECT_TRUE(known);
    for (const std::atomic<int>& times : done) EXPECT_EQ(times, 1);
  }
}

// What one loop writes plainly, the next reads plainly: Run is a barrier.
TEST_P(ParallelForTest, ThousandsOfRunsInARow) {
  ParallelFor team(GetParam());
  std::vector<int64_t> values(8, 0);
  for (int run = 0; run < 3000; ++run) {
    team.Run(8, [&](int64_t item, int) { values[static_cast<size_t>(item)] += item; });
    int64_t sum = 0;
    for (const int64_t value : values) sum += value;
    ASSERT_EQ(sum, int64_t{28} * (run + 1));
  }
}

TEST_P(ParallelForTest, ItemsOfOneThreadRise) {
  ParallelFor team(GetParam());
  std::vector<int64_t> last(static_cast<size_t>(GetParam()), -1);
  std::atomic<bool> rising{true};
  team.Run(5000, [&](int64_t item, int thread) {
    if (item <= last[static_cast<size_t>(thread)]) rising = false;
    last[static_cast<size_t>(thread)] = item;
  });
  EXPECT_TRUE(rising);
}

TEST_P(ParallelForTest, MayEndUnused) { ParallelFor team(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Threads, ParallelForTest, ::testing::Values(1, 2, 3, 8));

}  // namespace
}  // namespace writescope
