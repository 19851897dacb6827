// Limits read from a cgroup file system of the test's own.
#include "engine/base/cgroup_limits.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "tests/support/temp_dir.h"

namespace writescope {
namespace {

class CgroupLimitsTest : public ::testing::Test {
 protected:
  void Write(const std::string& name, const std::string& text) {
    const std::filesystem::path path = dir_.File(name);
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  double Quota() const { return CgroupCpuQuota(files()); }
  long long Memory() const { return CgroupMemoryLimit(files()); }
  CgroupFiles files() const {
    return {.membership = dir_.File("membership"), .mount = dir_.File("mount")};
  }

  testing_support::TempDir dir_;
};

TEST_F(CgroupLimitsTest, NoneWithoutFiles) {
  EXPECT_TRUE(std::isinf(Quota()));
  EXPECT_EQ(Memory(), std::numeric_limits<long long>::max());
}

TEST_F(CgroupLimitsTest, TheTightestAlongTheChainHolds) {
  Write("membership", "0::/pod/worker\n");
  Write("mount/pod/worker/cpu.max", "max 100000\n");
  Write("mount/pod/cpu.max", "400000 100000\n");
  Write("mount/cpu.max", "800000 100000\n");
  EXPECT_EQ(Quota(), 4);
  Write("mount/pod/worker/cpu.max", "150000 100000\n");
  EXPECT_EQ(Quota(), 1.5);
  Write("mount/pod/worker/memory.max", "max\n");
  Write("mount/pod/memory.max", "4096\n");
  EXPECT_EQ(Memory(), 4096);
}

TEST_F(CgroupLimitsTest, InAContainerTheMountIsTheGroup) {
  Write("membership", "0::/a/path/of/the/host\n");
  Write("mount/cpu.max", "400000 100000\n");
  EXPECT_EQ(Quota(), 4);
}

TEST_F(CgroupLimitsTest, Version1) {
  Write("membership", "4:memory:/pod\n2:cpu,cpuacct:/pod\n0::/\n");
  Write("mount/cpu/pod/cpu.cfs_quota_us", "-1\n");
  Write("mount/cpu/pod/cpu.cfs_period_us", "100000\n");
  EXPECT_TRUE(std::isinf(Quota()));
  Write("mount/cpu/pod/cpu.cfs_quota_us", "50000\n");
  EXPECT_EQ(Quota(), 0.5);
  Write("mount/memory/pod/memory.limit_in_bytes", "8192\n");
  EXPECT_EQ(Memory(), 8192);
}

TEST_F(CgroupLimitsTest, NonsenseIsNoLimit) {
  Write("membership", "nonsense\n0::/pod\n");
  Write("mount/pod/cpu.max", "many few\n");
  Write("mount/pod/memory.max", "-5\n");
  EXPECT_TRUE(std::isinf(Quota()));
  EXPECT_EQ(Memory(), std::numeric_limits<long long>::max());
}

}  // namespace
}  // namespace writescope
