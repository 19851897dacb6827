// What the control group of this process says about CPU quota and memory: in a container the limits
// that end or pause it. Version 2, and version 1 where the system still mounts that.
#pragma once

#include <optional>
#include <string>

namespace writescope::server {

struct CgroupStats {
  // Periods of the scheduler, and those of them in which the quota paused the process.
  double cpu_periods_total = 0;
  double cpu_throttled_periods_total = 0;
  double cpu_quota_cores = 0;  // 0: no quota.
  // Without page cache that can be dropped, as the out-of-memory decision of Kubernetes counts.
  double memory_used_bytes = 0;
  double memory_limit_bytes = 0;  // 0: no limit.
};

// Reads files at each call. Nothing where there is no control group to be read.
std::optional<CgroupStats> ReadCgroupStats();

// The same of files elsewhere: `mount` stands for /sys/fs/cgroup, `membership` for the file
// /proc/self/cgroup.
std::optional<CgroupStats> ReadCgroupStats(const std::string& mount, const std::string& membership);

}  // namespace writescope::server
