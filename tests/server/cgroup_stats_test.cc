#include "server/cgroup_stats.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/temp_dir.h"

namespace writescope::server {
namespace {

class CgroupStatsTest : public ::testing::Test {
 protected:
  void Write(const std::string& name, const std::string& text) {
    const std::filesystem::path path = dir_.File(name);
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  std::optional<CgroupStats> Read() {
    return ReadCgroupStats(dir_.File("mount"), dir_.File("membership"));
  }

  testing_support::TempDir dir_;
};

TEST_F(CgroupStatsTest, Version2InItsOwnGroup) {
  Write("membership", "0::/pod/worker\n");
  Write("mount/memory.current", "1\n");  // Of the machine: not the process's.
  Write("mount/pod/worker/cgroup.procs", "1\n");
  Write("mount/pod/worker/memory.current", "9000\n");
  Write("mount/pod/worker/memory.max", "16384\n");
  Write("mount/pod/worker/memory.stat", "anon 8000\ninactive_file 1000\nfile 500\n");
  Write("mount/pod/worker/cpu.stat", "usage_usec 5\nnr_periods 200\nnr_throttled 30\n");
  Write("mount/pod/worker/cpu.max", "350000 100000\n");
  const auto stats = Read();
  ASSERT_TRUE(stats.has_value());
  EXPECT_EQ(stats->memory_used_bytes, 8000);
  EXPECT_EQ(stats->memory_limit_bytes, 16384);
  EXPECT_EQ(stats->cpu_periods_total, 200);
  EXPECT_EQ(stats->cpu_throttled_periods_total, 30);
  EXPECT_EQ(stats->cpu_quota_cores, 3.5);
}

TEST_F(CgroupStatsTest, Version2InAContainerWithoutLimits) {
  Write("membership", "0::/a/path/of/the/host\n");
  Write("mount/cgroup.procs", "1\n");
  Write("mount/memory.current", "9000\n");
  Write("mount/memory.max", "max\n");
  Write("mount/cpu.max", "max 100000\n");
  const auto stats = Read();
  ASSERT_TRUE(stats.has_value());
  EXPECT_EQ(stats->memory_used_bytes, 9000);
  EXPECT_EQ(stats->memory_limit_bytes, 0);
  EXPECT_EQ(stats->cpu_quota_cores, 0);
}

TEST_F(CgroupStatsTest, Version1) {
  Write("membership", "4:memory:/pod\n2:cpu,cpuacct:/pod\n0::/\n");
  Write("mount/memory/pod/cgroup.procs", "1\n");
  Write("mount/memory/pod/memory.usage_in_bytes", "7000\n");
  Write("mount/memory/pod/memory.limit_in_bytes", "9223372036854771712\n");
  Write("mount/memory/pod/memory.stat", "inactive_file 1\ntotal_inactive_file 500\n");
  Write("mount/cpu/pod/cgroup.procs", "1\n");
  Write("mount/cpu/pod/cpu.stat", "nr_periods 10\nnr_throttled 4\nthrottled_time 9\n");
  Write("mount/cpu/pod/cpu.cfs_quota_us", "50000\n");
  Write("mount/cpu/pod/cpu.cfs_period_us", "100000\n");
  const auto stats = Read();
  ASSERT_TRUE(stats.has_value());
  EXPECT_EQ(stats->memory_used_bytes, 6500);
  EXPECT_EQ(stats->memory_limit_bytes, 0);
  EXPECT_EQ(stats->cpu_periods_total, 10);
  EXPECT_EQ(stats->cpu_throttled_periods_total, 4);
  EXPECT_EQ(stats->cpu_quota_cores, 0.5);
}

TEST_F(CgroupStatsTest, NothingToRead) { EXPECT_FALSE(Read().has_value()); }

}  // namespace
}  // namespace writescope::server
