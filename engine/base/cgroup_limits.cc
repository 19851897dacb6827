#include "engine/base/cgroup_limits.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string_view>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace writescope {
namespace {

std::string ReadLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The folders of this process's cgroup, innermost first. `controller` is empty for version 2.
std::vector<std::string> CgroupChain(const CgroupFiles& files, std::string_view controller) {
  std::string mount = files.mount;
  if (!controller.empty()) mount.append("/").append(controller);
  std::vector<std::string> chain;
  std::ifstream file(files.membership);
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    bool wanted = false;
    for (absl::string_view name : absl::StrSplit(parts[1], ',')) {
      wanted |= std::string_view(name.data(), name.size()) == controller;
    }
    if (!wanted) continue;
    std::string path = parts[2];
    while (true) {
      chain.push_back(mount + (path == "/" ? "" : path));
      if (path.empty() || path == "/") break;
      path = path.substr(0, path.rfind('/'));
    }
  }
  // Inside a container the path of the host may not exist; the mount point then is the limit.
  chain.push_back(mount);
  return chain;
}

}  // namespace

double CgroupCpuQuota(const CgroupFiles& files) {
  double quota = std::numeric_limits<double>::infinity();
  for (const std::string& folder : CgroupChain(files, "")) {
    const std::vector<std::string> parts = absl::StrSplit(ReadLine(folder + "/cpu.max"), ' ');
    double allowed = 0, period = 0;
    if (parts.size() == 2 && absl::SimpleAtod(parts[0], &allowed) &&
        absl::SimpleAtod(parts[1], &period) && period > 0) {
      quota = std::min(quota, allowed / period);
    }
  }
  for (const std::string& folder : CgroupChain(files, "cpu")) {
    double allowed = 0, period = 0;
    if (absl::SimpleAtod(ReadLine(folder + "/cpu.cfs_quota_us"), &allowed) && allowed > 0 &&
        absl::SimpleAtod(ReadLine(folder + "/cpu.cfs_period_us"), &period) && period > 0) {
      quota = std::min(quota, allowed / period);
    }
  }
  return quota;
}

long long CgroupMemoryLimit(const CgroupFiles& files) {
  long long limit = std::numeric_limits<long long>::max();
  const auto apply = [&limit](const std::string& text) {
    int64_t bytes = 0;
    if (absl::SimpleAtoi(text, &bytes) && bytes > 0) limit = std::min<long long>(limit, bytes);
  };
  for (const std::string& folder : CgroupChain(files, "")) {
    apply(ReadLine(folder + "/memory.max"));
  }
  for (const std::string& folder : CgroupChain(files, "memory")) {
    apply(ReadLine(folder + "/memory.limit_in_bytes"));
  }
  return limit;
}

}  // namespace writescope
