#include "server/cgroup_stats.h"

#include <fstream>
#include <sstream>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace writescope::server {
namespace {

// Version 1 writes "no limit" as the largest number of whole pages.
constexpr double kNoLimitBytes = 1e18;

std::string ReadAll(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::optional<double> ReadNumber(const std::string& path) {
  double value = 0;
  if (!absl::SimpleAtod(ReadAll(path), &value)) return std::nullopt;
  return value;
}

// The number behind `name` in a file of lines "name number".
std::optional<double> ReadField(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string found;
  for (double value = 0; file >> found >> value;) {
    if (found == name) return value;
  }
  return std::nullopt;
}

// The process's group in the hierarchy of `controller` (empty: of version 2). Inside a container
// the path is the host's, and the mount point itself is the group.
std::string GroupFolder(const std::string& mount, const std::string& membership,
                        const std::string& controller) {
  std::ifstream file(membership);
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::vector<std::string> names = absl::StrSplit(parts[1], ',');
    bool found = false;
    for (const std::string& name : names) found |= name == controller;
    const std::string folder = mount + parts[2];
    if (found && std::ifstream(folder + "/cgroup.procs").good()) return folder;
  }
  return mount;
}

std::optional<CgroupStats> ReadVersion2(const std::string& mount, const std::string& membership) {
  const std::string folder = GroupFolder(mount, membership, "");
  const auto used = ReadNumber(folder + "/memory.current");
  if (!used.has_value()) return std::nullopt;
  CgroupStats stats;
  stats.memory_used_bytes = *used - ReadField(folder + "/memory.stat", "inactive_file").value_or(0);
  stats.memory_limit_bytes = ReadNumber(folder + "/memory.max").value_or(0);
  stats.cpu_periods_total = ReadField(folder + "/cpu.stat", "nr_periods").value_or(0);
  stats.cpu_throttled_periods_total = ReadField(folder + "/cpu.stat", "nr_throttled").value_or(0);
  std::istringstream quota(ReadAll(folder + "/cpu.max"));  // "max 100000" without a quota.
  double allowed = 0;
  double period = 0;
  if (quota >> allowed >> period && period > 0) stats.cpu_quota_cores = allowed / period;
  return stats;
}

std::optional<CgroupStats> ReadVersion1(const std::string& mount, const std::string& membership) {
  const std::string memory = GroupFolder(mount + "/memory", membership, "memory");
  const auto used = ReadNumber(memory + "/memory.usage_in_bytes");
  if (!used.has_value()) return std::nullopt;
  CgroupStats stats;
  stats.memory_used_bytes =
      *used - ReadField(memory + "/memory.stat", "total_inactive_file").value_or(0);
  const double limit = ReadNumber(memory + "/memory.limit_in_bytes").value_or(0);
  stats.memory_limit_bytes = limit < kNoLimitBytes ? limit : 0;
  const std::string cpu = GroupFolder(mount + "/cpu", membership, "cpu");
  stats.cpu_periods_total = ReadField(cpu + "/cpu.stat", "nr_periods").value_or(0);
  stats.cpu_throttled_periods_total = ReadField(cpu + "/cpu.stat", "nr_throttled").value_or(0);
  const double allowed = ReadNumber(cpu + "/cpu.cfs_quota_us").value_or(0);
  const double period = ReadNumber(cpu + "/cpu.cfs_period_us").value_or(0);
  if (allowed > 0 && period > 0) stats.cpu_quota_cores = allowed / period;
  return stats;
}

}  // namespace

std::optional<CgroupStats> ReadCgroupStats() {
  return ReadCgroupStats("/sys/fs/cgroup", "/proc/self/cgroup");
}

std::optional<CgroupStats> ReadCgroupStats(const std::string& mount,
                                           const std::string& membership) {
  std::optional<CgroupStats> stats = ReadVersion2(mount, membership);
  if (!stats.has_value()) stats = ReadVersion1(mount, membership);
  if (stats.has_value() && stats->memory_used_bytes < 0) stats->memory_used_bytes = 0;
  return stats;
}

}  // namespace writescope::server
