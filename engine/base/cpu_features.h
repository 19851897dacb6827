// What this machine's processors offer, and how many of them this process may use.
#pragma once

#include <optional>
#include <span>
#include <string_view>

namespace writescope {

// In rising order: each level includes those before it.
enum class CpuIsa { kGeneric, kAvx2, kAvx512, kAvx512Bf16, kAmx };

std::string_view CpuIsaName(CpuIsa isa);
std::optional<CpuIsa> ParseCpuIsa(std::string_view name);

// All of them, in order.
std::span<const CpuIsa> AllCpuIsas();

// The best level the processor and the operating system support. Asks the system, once, for the
// right to use the tile registers of AMX, which every thread of the process then has.
CpuIsa DetectedCpuIsa();

// DetectedCpuIsa(), or the level named by WRITESCOPE_FORCE_ISA (generic, avx2, avx512,
// avx512bf16, amx). A forced level that is unknown or not supported ends the process: a silent
// fallback would hide it.
CpuIsa ActiveCpuIsa();

// Whether ActiveCpuIsa() was named and not chosen.
bool IsCpuIsaForced();

// Whether vdpbf16ps is issued as often as a fused multiply-add. By the vendor, since it holds for
// every AMD processor that has it (Zen 4 on) and for none of Intel's (Emerald Rapids: a third), and
// a measurement at start would differ between starts on a busy machine.
bool HasFastBf16Products();

// Cores this process may use: the smaller of its affinity mask and its cgroup's CPU quota (v2 and
// v1, the tightest along the chain, rounded down), at least 1. Read anew at each call.
int UsableCores();

// Host memory this process may use: the smaller of the machine's and its cgroup chain's limit.
long long UsableHostMemoryBytes();

}  // namespace writescope
