// What the cgroups of this process, version 2 and version 1, let it use.
#pragma once

#include <string>

namespace writescope {

// Where the kernel tells of them; a test has its own.
struct CgroupFiles {
  std::string membership = "/proc/self/cgroup";
  std::string mount = "/sys/fs/cgroup";
};

// The tightest along the chain of groups; infinite without any. In CPUs, and in bytes.
double CgroupCpuQuota(const CgroupFiles& files = {});
long long CgroupMemoryLimit(const CgroupFiles& files = {});

}  // namespace writescope
