#include "engine/base/cpu_features.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace writescope {
namespace {

TEST(CpuFeatures, NamesAndLevels) {
  for (const CpuIsa isa : AllCpuIsas()) {
    EXPECT_EQ(ParseCpuIsa(CpuIsaName(isa)), isa);
  }
  EXPECT_EQ(ParseCpuIsa("sse9"), std::nullopt);
  EXPECT_EQ(ParseCpuIsa(""), std::nullopt);
  EXPECT_LE(ActiveCpuIsa(), DetectedCpuIsa());
}

// ActiveCpuIsa is decided once a process, so each case is a process of its own: the statement of a
// death test runs in one, and tells by its exit.
int ExitWithActive(const char* forced) {
  setenv("WRITESCOPE_FORCE_ISA", forced, 1);
  std::fprintf(stderr, "active %s\n", std::string(CpuIsaName(ActiveCpuIsa())).c_str());
  std::exit(0);
}

class ForcedIsaDeathTest : public ::testing::Test {
 protected:
  // Runs the program anew, so that nothing has asked for the level before.
  ForcedIsaDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(ForcedIsaDeathTest, EveryLevelUpToTheProcessors) {
  for (const CpuIsa isa : AllCpuIsas()) {
    const std::string name(CpuIsaName(isa));
    if (isa <= DetectedCpuIsa()) {
      EXPECT_EXIT(ExitWithActive(name.c_str()), ::testing::ExitedWithCode(0), "active " + name);
    } else {
      EXPECT_DEATH(ExitWithActive(name.c_str()), "asks for '" + name + "'");
    }
  }
}

TEST_F(ForcedIsaDeathTest, UnknownLevelEndsTheProcess) {
  EXPECT_DEATH(ExitWithActive("avx9000"),
               "'avx9000'; it may be generic, avx2, avx512, avx512bf16 or amx");
  EXPECT_DEATH(ExitWithActive(""), "WRITESCOPE_FORCE_ISA is ''");
}

TEST(CpuFeatures, CoresFollowTheAffinityMask) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  EXPECT_GE(UsableCores(), 1);
  EXPECT_LE(UsableCores(), CPU_COUNT(&before));
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(UsableCores(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

TEST(CpuFeatures, MemoryIsSomeAndNoMoreThanTheMachines) {
  EXPECT_GT(UsableHostMemoryBytes(), 16LL << 20);
  EXPECT_LE(UsableHostMemoryBytes(), 1LL << 50);
}

}  // namespace
}  // namespace writescope
