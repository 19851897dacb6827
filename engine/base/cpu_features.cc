#include "engine/base/cpu_features.h"

#include <cpuid.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "engine/base/check.h"

namespace writescope {
namespace {

constexpr CpuIsa kAllIsas[] = {CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512,
                               CpuIsa::kAvx512Bf16, CpuIsa::kAmx};

// Asked of the processor, since clang-tidy's builtin does not know the names.
bool HasAmxBf16() {
  constexpr unsigned kAmxBf16 = 1u << 22;
  constexpr unsigned kAmxTile = 1u << 24;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  return (edx & kAmxBf16) != 0 && (edx & kAmxTile) != 0;
}

// Linux hands out the tile registers, 8 KiB of state a thread, on request only.
bool RequestAmxTiles() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, which older headers lack.
  constexpr int kTileData = 18;               // Number of the state component
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

CpuIsa Detect() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return CpuIsa::kGeneric;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return CpuIsa::kAvx2;
  }
  if (!__builtin_cpu_supports("avx512bf16")) return CpuIsa::kAvx512;
  if (!HasAmxBf16() || !RequestAmxTiles()) return CpuIsa::kAvx512Bf16;
  return CpuIsa::kAmx;
}

std::string ReadLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The folders of this process's cgroup, innermost first. `controller` is empty for version 2.
std::vector<std::string> CgroupChain(std::string_view controller, const std::string& mount) {
  std::vector<std::string> chain;
  std::ifstream file("/proc/self/cgroup");
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

double CgroupCpuQuota() {
  double quota = std::numeric_limits<double>::infinity();
  for (const std::string& folder : CgroupChain("", "/sys/fs/cgroup")) {
    const std::vector<std::string> parts = absl::StrSplit(ReadLine(folder + "/cpu.max"), ' ');
    double allowed = 0, period = 0;
    if (parts.size() == 2 && absl::SimpleAtod(parts[0], &allowed) &&
        absl::SimpleAtod(parts[1], &period) && period > 0) {
      quota = std::min(quota, allowed / period);
    }
  }
  for (const std::string& folder : CgroupChain("cpu", "/sys/fs/cgroup/cpu")) {
    double allowed = 0, period = 0;
    if (absl::SimpleAtod(ReadLine(folder + "/cpu.cfs_quota_us"), &allowed) && allowed > 0 &&
        absl::SimpleAtod(ReadLine(folder + "/cpu.cfs_period_us"), &period) && period > 0) {
      quota = std::min(quota, allowed / period);
    }
  }
  return quota;
}

}  // namespace

std::string_view CpuIsaName(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kGeneric:
      return "generic";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
    case CpuIsa::kAvx512Bf16:
      return "avx512bf16";
    case CpuIsa::kAmx:
      return "amx";
  }
  return "unknown";
}

std::optional<CpuIsa> ParseCpuIsa(std::string_view name) {
  for (const CpuIsa isa : kAllIsas) {
    if (name == CpuIsaName(isa)) return isa;
  }
  return std::nullopt;
}

std::span<const CpuIsa> AllCpuIsas() { return kAllIsas; }

CpuIsa DetectedCpuIsa() {
  static const CpuIsa detected = Detect();
  return detected;
}

CpuIsa ActiveCpuIsa() {
  static const CpuIsa active = [] {
    const char* forced = std::getenv("WRITESCOPE_FORCE_ISA");
    if (forced == nullptr) return DetectedCpuIsa();
    const std::optional<CpuIsa> isa = ParseCpuIsa(forced);
    CHECK(isa.has_value()) << "WRITESCOPE_FORCE_ISA is '" << forced
                           << "'; it may be generic, avx2, avx512, avx512bf16 or amx";
    CHECK(*isa <= DetectedCpuIsa())
        << "WRITESCOPE_FORCE_ISA asks for '" << forced << "', this processor offers up to '"
        << std::string(CpuIsaName(DetectedCpuIsa())) << "'";
    return *isa;
  }();
  return active;
}

bool IsCpuIsaForced() { return std::getenv("WRITESCOPE_FORCE_ISA") != nullptr; }

bool HasFastBf16Products() {
  __builtin_cpu_init();
  return DetectedCpuIsa() >= CpuIsa::kAvx512Bf16 && __builtin_cpu_is("amd");
}

int UsableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cores = sched_getaffinity(0, sizeof(set), &set) == 0
                  ? CPU_COUNT(&set)
                  : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const double quota = CgroupCpuQuota();
  if (quota < cores) cores = static_cast<int>(quota);
  return std::max(cores, 1);
}

long long UsableHostMemoryBytes() {
  long long limit = static_cast<long long>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  const auto apply = [&limit](const std::string& text) {
    int64_t bytes = 0;
    if (absl::SimpleAtoi(text, &bytes) && bytes > 0) limit = std::min<long long>(limit, bytes);
  };
  for (const std::string& folder : CgroupChain("", "/sys/fs/cgroup")) {
    apply(ReadLine(folder + "/memory.max"));
  }
  for (const std::string& folder : CgroupChain("memory", "/sys/fs/cgroup/memory")) {
    apply(ReadLine(folder + "/memory.limit_in_bytes"));
  }
  return limit;
}

}  // namespace writescope
