#include "engine/runtime/machine_probe.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/base/cpu_features.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"
#include "engine/runtime/rate_probe.h"

namespace writescope::runtime {
namespace {

constexpr int64_t kSmallestCopy = 16 * kKiB;
constexpr int kHandoffs = 2000;
constexpr double kAnswerSeconds = 5;  // Longer than the device itself waits for a flag here
constexpr absl::Duration kQueueLimit = absl::Seconds(10);
constexpr double kGiga = 1e9;
// A step pays for a hand-off in each layer: with 48 of them this is 2 ms and more.
constexpr double kSlowHandoffSeconds = 50e-6;

std::string CpuModel() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (absl::StartsWith(line, "model name") && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

int NumaNodes() {
  int nodes = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/devices/system/node", error)) {
    const std::string name = entry.path().filename().string();
    if (absl::StartsWith(name, "node") && name.size() > 4 && std::isdigit(name[4])) ++nodes;
  }
  return std::max(nodes, 1);
}

std::string HugePages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string text;
  std::getline(file, text);
  const size_t open = text.find('[');
  const size_t close = text.find(']');
  if (open == std::string::npos || close == std::string::npos) return "unknown";
  return text.substr(open + 1, close - open - 1);
}

std::string GigabytesPerSecond(double bytes_per_s) {
  return absl::StrFormat("%.1f", bytes_per_s / kGiga);
}

std::vector<int> WorkerCounts(int cores) {
  std::vector<int> counts;
  for (const int count : {1, cores / 4, cores / 2, cores * 5 / 8, cores * 3 / 4, cores - 3,
                          cores - 2, cores - 1, cores}) {
    if (count >= 1) counts.push_back(count);
  }
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  return counts;
}

// t = fixed + bytes / rate, from the smallest copy and the largest.
double CopyOverhead(const std::vector<CopyRate>& copies) {
  if (copies.size() < 2) return 0;
  const CopyRate& small = copies.front();
  const CopyRate& large = copies.back();
  const double small_s = static_cast<double>(small.copy_bytes) / small.bytes_per_s;
  return std::max(0.0, small_s - static_cast<double>(small.copy_bytes) / large.bytes_per_s);
}

// Bytes per second of copies of this size over all of `host`, two in flight.
absl::StatusOr<double> MeasureCopy(device::Queue& queue, const device::Buffer& host,
                                   device::Buffer& on_device, int64_t copy_bytes, double seconds) {
  device::Event last[2];
  int64_t copied = 0;
  const int64_t places = host.size_bytes() / copy_bytes;
  const double began_s = device::NowSeconds();
  for (int64_t i = 0; device::NowSeconds() - began_s < seconds; ++i) {
    RETURN_IF_ERROR(last[i % 2].Wait(kQueueLimit));
    queue.Copy(on_device.data(), host.data() + i % places * copy_bytes, copy_bytes);
    last[i % 2] = queue.Record();
    copied += copy_bytes;
  }
  RETURN_IF_ERROR(queue.Record().Wait(kQueueLimit));
  return static_cast<double>(copied) / (device::NowSeconds() - began_s);
}

std::vector<std::string> WarningsOf(const Diagnosis& d) {
  std::vector<std::string> warnings;
  const SystemFacts& facts = d.facts;
  if (facts.memlock_limit_bytes >= 0 && facts.memlock_limit_bytes < facts.usable_memory_bytes / 2) {
    warnings.push_back(absl::StrCat("the memlock limit is ", facts.memlock_limit_bytes / kMiB,
                                    " MiB: page-locking KV may fail; raise it (ulimit -l)"));
  }
  if (facts.huge_pages == "never") {
    warnings.push_back(
        "transparent huge pages are off: CPU attention reads slower; set them to "
        "madvise in /sys/kernel/mm/transparent_hugepage/enabled");
  }
  if (facts.numa_nodes > 1) {
    warnings.push_back(absl::StrCat(facts.numa_nodes,
                                    " NUMA nodes: run the worker on the cores "
                                    "and memory of the GPU's (numactl)"));
  }
  if (facts.usable_cores < 4) {
    warnings.push_back(absl::StrCat(
        facts.usable_cores, " usable cores: attention of the CPU shares them with all else"));
  }
  if (d.handoff.median_s > kSlowHandoffSeconds) {
    warnings.push_back(absl::StrFormat("a hand-off takes %.0f us: something lets the cores sleep",
                                       1e6 * d.handoff.median_s));
  }
  return warnings;
}

}  // namespace

SystemFacts ReadSystemFacts() {
  SystemFacts facts;
  facts.cpu_model = CpuModel();
  facts.isa = std::string(CpuIsaName(ActiveCpuIsa()));
  facts.usable_cores = UsableCores();
  facts.machine_cores = static_cast<int>(std::thread::hardware_concurrency());
  facts.usable_memory_bytes = UsableHostMemoryBytes();
  rlimit limit{.rlim_cur = RLIM_INFINITY, .rlim_max = RLIM_INFINITY};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) {
    Log(LogLevel::kWarning, "the memlock limit cannot be read", {{"errno", errno}});
  }
  facts.memlock_limit_bytes =
      limit.rlim_cur == RLIM_INFINITY ? -1 : static_cast<int64_t>(limit.rlim_cur);
  facts.huge_pages = HugePages();
  facts.numa_nodes = NumaNodes();
  return facts;
}

absl::StatusOr<std::vector<CopyRate>> MeasureCopies(device::Device& device,
                                                    const MachineProbeOptions& options) {
  ASSIGN_OR_RETURN(device::Buffer host,
                   device.AllocateHost(options.host_bytes, device::HostMemory::kPageLocked,
                                       "copies of the doctor"));
  ASSIGN_OR_RETURN(device::Buffer on_device,
                   device.AllocateDevice(options.device_bytes, "copies of the doctor"));
  std::vector<CopyRate> rates;
  for (int64_t size = kSmallestCopy; size <= std::min(options.device_bytes, options.host_bytes);
       size *= 4) {
    const absl::StatusOr<double> rate =
        MeasureCopy(device.upload(), host, on_device, size, options.seconds);
    if (!rate.ok()) {
      device::AwaitIdle({&device.upload()}, "doctor");  // Copies under way use the memory here.
      return absl::Status(rate.status().code(),
                          absl::StrCat("copies of ", size, " bytes: ", rate.status().message()));
    }
    rates.push_back({size, *rate});
  }
  return rates;
}

absl::StatusOr<std::vector<WorkerRates>> MeasureWorkers(device::Device& device,
                                                        const MachineProbeOptions& options) {
  std::vector<WorkerRates> all;
  for (const int workers : WorkerCounts(UsableCores())) {
    ASSIGN_OR_RETURN(
        const roofline::MachineProfile profile,
        ProbeRates(device, {.geometry = options.geometry,
                            .query_group = options.query_group,
                            .num_workers = workers,
                            .seconds = options.seconds,
                            .host_bytes = options.host_bytes,
                            .device_bytes = options.device_bytes,
                            .copy_bytes = std::min<int64_t>(options.device_bytes, 2 * kMiB),
                            .products = options.products}));
    all.push_back({workers, profile.rates});
  }
  return all;
}

absl::StatusOr<HandoffTimes> MeasureHandoff(device::Device& device) {
  ASSIGN_OR_RETURN(device::Buffer memory,
                   device.AllocateHost(4096, device::HostMemory::kPageLocked, "flags"));
  auto* go = new (memory.data()) std::atomic<uint64_t>(0);
  auto* seen = new (memory.data() + 64) std::atomic<uint64_t>(0);
  device::Queue& queue = device.compute();
  std::vector<double> seconds;
  for (uint64_t i = 1; i <= kHandoffs; ++i) {
    queue.WaitFlag(go, i, absl::Seconds(2), nullptr);
    queue.SetFlag(seen, i);
    // The device has begun to wait by then.
    const double ready_s = device::NowSeconds() + 50e-6;
    while (device::NowSeconds() < ready_s) {
    }
    const double start_s = device::NowSeconds();
    go->store(i, std::memory_order_release);
    while (seen->load(std::memory_order_acquire) < i) {
      if (device::NowSeconds() - start_s > kAnswerSeconds) {
        device::AwaitIdle({&queue}, "doctor");  // Its waits and stores use the memory here.
        return absl::DeadlineExceededError(absl::StrCat("the device did not answer flag ", i,
                                                        " of ", kHandoffs, " within ",
                                                        kAnswerSeconds, " s"));
      }
    }
    seconds.push_back(device::NowSeconds() - start_s);
  }
  RETURN_IF_ERROR(queue.Record().Wait(kQueueLimit));
  RETURN_IF_ERROR(queue.TakeError());
  std::sort(seconds.begin(), seconds.end());
  return HandoffTimes{seconds[seconds.size() / 2], seconds[seconds.size() * 99 / 100]};
}

absl::StatusOr<Diagnosis> Diagnose(device::Device& device, const MachineProbeOptions& options,
                                   int64_t vram_budget_bytes) {
  Diagnosis d;
  d.facts = ReadSystemFacts();
  ASSIGN_OR_RETURN(d.copies, MeasureCopies(device, options));
  ASSIGN_OR_RETURN(d.workers, MeasureWorkers(device, options));
  // The CPU device's flags are polled by a sleeping thread; its hand-off says nothing of a GPU's.
  ASSIGN_OR_RETURN(d.handoff, MeasureHandoff(device));
  const auto together = [](const WorkerRates& w) {
    return w.rates.cpu_with_link + w.rates.link_with_cpu;
  };
  const WorkerRates& best = *std::max_element(
      d.workers.begin(), d.workers.end(),
      [&](const WorkerRates& a, const WorkerRates& b) { return together(a) < together(b); });
  d.profile.name = device.description();
  d.profile.measured = true;
  d.profile.source = absl::StrCat("writescope doctor on ", d.facts.usable_cores, " cores of ",
                                  d.facts.cpu_model, ", attention by ", d.facts.isa);
  d.profile.rates = best.rates;
  d.profile.cpu_workers = best.workers;
  d.profile.handoff_per_layer_seconds = d.handoff.median_s;
  d.profile.copy_overhead_seconds = CopyOverhead(d.copies);
  d.profile.device_budget_bytes = vram_budget_bytes;
  d.profile.host_budget_bytes = d.facts.usable_memory_bytes / 4 * 3;
  d.warnings = WarningsOf(d);
  d.flags = absl::StrCat("--device=", device.name(), " --vram-budget=", vram_budget_bytes / kMiB,
                         "MiB --host-budget=", d.profile.host_budget_bytes / kMiB,
                         "MiB --workers=", best.workers);
  return d;
}

std::string Diagnosis::ToString() const {
  std::string text = absl::StrCat(
      "CPU       ", facts.cpu_model, ", ", facts.usable_cores, " of ", facts.machine_cores,
      " cores usable, attention by ", facts.isa, "\n", "memory    ",
      facts.usable_memory_bytes / kGiB, " GiB usable; memlock ",
      facts.memlock_limit_bytes < 0 ? "unlimited"
                                    : absl::StrCat(facts.memlock_limit_bytes / kMiB, " MiB"),
      "; transparent huge pages ", facts.huge_pages, "; ", facts.numa_nodes, " NUMA node",
      facts.numa_nodes == 1 ? "" : "s", "\n");
  absl::StrAppend(&text, "device    ", profile.name, "\n\nlink, host to device, by size of copy\n");
  for (const CopyRate& copy : copies) {
    absl::StrAppendFormat(&text, "  %9d KiB %8s GB/s\n", copy.copy_bytes / kKiB,
                          GigabytesPerSecond(copy.bytes_per_s));
  }
  absl::StrAppend(&text, "\nGB/s by workers   CPU alone   link alone   together: CPU + link\n");
  for (const WorkerRates& w : workers) {
    absl::StrAppendFormat(
        &text, "  %13d %11s %12s %12s + %s = %s%s\n", w.workers,
        GigabytesPerSecond(w.rates.cpu_alone), GigabytesPerSecond(w.rates.link_alone),
        GigabytesPerSecond(w.rates.cpu_with_link), GigabytesPerSecond(w.rates.link_with_cpu),
        GigabytesPerSecond(w.rates.cpu_with_link + w.rates.link_with_cpu),
        w.workers == profile.cpu_workers ? "  <- most" : "");
  }
  absl::StrAppendFormat(&text,
                        "\nhand-off  CPU flag to device to CPU: median %.1f us, p99 %.1f us\n",
                        1e6 * handoff.median_s, 1e6 * handoff.p99_s);
  for (const std::string& warning : warnings) absl::StrAppend(&text, "warning   ", warning, "\n");
  absl::StrAppend(&text, "\nstart the worker with: ", flags, "\n");
  return text;
}

}  // namespace writescope::runtime
