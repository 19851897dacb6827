#include "engine/attention/worker_claims.h"

#include <gtest/gtest.h>

namespace writescope::attention {
namespace {

// Sequences of 6, 1 and 5 blocks; the first and the last one in two runs.
TEST(CutNear, GoesToTheNextSequenceWhereThatIsNear) {
  RunList list;
  list.readers = {0, 0, 1, 2, 2};
  int reader = 0;
  for (const int blocks : {4, 2, 1, 2, 3}) {
    list.swing.Add({.region = kvcache::RegionKind::kSwing,
                    .num_blocks = blocks,
                    .first_reader = reader++,
                    .num_readers = 1});
  }
  const auto cut = [&](int64_t block, int64_t slack) {
    return CutNear(list, list.swing, block, slack);
  };
  for (int64_t block = -1; block <= 13; ++block) EXPECT_EQ(cut(block, 0), block);
  EXPECT_EQ(cut(1, 1), 0);
  EXPECT_EQ(cut(2, 1), 2);
  EXPECT_EQ(cut(4, 2), 6);  // Where a run ends but not its sequence there is nothing to cut at.
  EXPECT_EQ(cut(4, 1), 4);
  EXPECT_EQ(cut(5, 1), 6);
  EXPECT_EQ(cut(6, 3), 6);
  EXPECT_EQ(cut(8, 2), 7);
  EXPECT_EQ(cut(9, 1), 9);
  EXPECT_EQ(cut(10, 2), 12);  // The end
  EXPECT_EQ(cut(10, 3), 12);  // The nearer one
  EXPECT_EQ(cut(3, 3), 0);
  EXPECT_EQ(cut(12, 5), 12);
}

}  // namespace
}  // namespace writescope::attention
