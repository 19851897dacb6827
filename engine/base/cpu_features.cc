#include "engine/base/cpu_features.h"

#include <cpuid.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "engine/base/cgroup_limits.h"
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
  const long long limit = static_cast<long long>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  return std::min<long long>(limit, CgroupMemoryLimit());
}

}  // namespace writescope
