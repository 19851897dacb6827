// How records of kernels become an idle share.
#include "tests/bench/engine_bench/kernel_times.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace writescope::bench {
namespace {

using ::testing::HasSubstr;

TEST(KernelTimes, KernelsThatOverlapAreBusyOnce) {
  EXPECT_EQ(BusySeconds({}), 0);
  EXPECT_EQ(BusySeconds({{"a", 5, 5}}), 0);
  EXPECT_DOUBLE_EQ(BusySeconds({{"a", 0, 60}, {"b", 40, 100}}), 100e-9);
  // One within another, then a gap; in any order.
  EXPECT_DOUBLE_EQ(BusySeconds({{"c", 85, 100}, {"a", 0, 60}, {"b", 10, 20}}), 75e-9);
  EXPECT_DOUBLE_EQ(BusySeconds({{"a", 100, 110}, {"b", 120, 130}, {"c", 140, 150}}), 30e-9);
}

TEST(KernelTimes, BetweenLaunchesOfGraphsIsNotWithinThem) {
  EXPECT_EQ(IdleShareInLaunches({}), 0);
  EXPECT_EQ(IdleShareInLaunches({{"a", 0, 10, 1}, {"b", 90, 100, 2}}), 0);
  // 10 of 50, and nothing of 50.
  EXPECT_DOUBLE_EQ(IdleShareInLaunches(
                       {{"a", 0, 20, 1}, {"b", 30, 50, 1}, {"a", 900, 920, 2}, {"b", 910, 950, 2}}),
                   0.1);
}

TEST(KernelTimes, TheTableSaysWhatEachAdds) {
  const std::string table =
      KernelTable({{"a", 0, 2000}, {"b", 1000, 5000}, {"a", 6000, 7000}, {"c", 6100, 6500}});
  EXPECT_THAT(table, HasSubstr("       2     1.50         0.50  a\n"));
  EXPECT_THAT(table, HasSubstr("       1     3.00         0.00  b\n"));
  EXPECT_THAT(table, HasSubstr("       1     0.00         0.00  c\n"));
}

}  // namespace
}  // namespace writescope::bench
