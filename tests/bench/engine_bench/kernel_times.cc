#include "tests/bench/engine_bench/kernel_times.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace writescope::bench {
namespace {

void SortByStart(std::vector<KernelSpan>& spans) {
  std::sort(spans.begin(), spans.end(),
            [](const KernelSpan& a, const KernelSpan& b) { return a.start_ns < b.start_ns; });
}

struct Times {
  int64_t busy_ns = 0;
  int64_t idle_ns = 0;  // Between kernels
};

Times TimesOf(std::vector<KernelSpan> spans) {
  if (spans.empty()) return {};
  SortByStart(spans);
  Times times;
  int64_t busy_until_ns = spans[0].start_ns;
  for (const KernelSpan& span : spans) {
    times.idle_ns += std::max<int64_t>(0, span.start_ns - busy_until_ns);
    busy_until_ns = std::max(busy_until_ns, span.end_ns);
  }
  times.busy_ns = busy_until_ns - spans[0].start_ns - times.idle_ns;
  return times;
}

}  // namespace

double BusySeconds(std::vector<KernelSpan> spans) {
  return 1e-9 * static_cast<double>(TimesOf(std::move(spans)).busy_ns);
}

double IdleShareInLaunches(const std::vector<KernelSpan>& spans) {
  std::map<uint64_t, std::vector<KernelSpan>> launches;
  for (const KernelSpan& span : spans) launches[span.launch].push_back(span);
  Times sum;
  for (auto& [launch, own] : launches) {
    const Times times = TimesOf(std::move(own));
    sum.busy_ns += times.busy_ns;
    sum.idle_ns += times.idle_ns;
  }
  const int64_t all_ns = sum.busy_ns + sum.idle_ns;
  return all_ns > 0 ? static_cast<double>(sum.idle_ns) / static_cast<double>(all_ns) : 0;
}

std::string KernelTable(std::vector<KernelSpan> spans) {
  struct Entry {
    std::string name;
    int count = 0;
    double busy_us = 0, idle_us = 0;
  };
  std::vector<Entry> entries;
  SortByStart(spans);
  int64_t busy_until_ns = spans.empty() ? 0 : spans[0].start_ns;
  for (const KernelSpan& span : spans) {
    auto entry = std::find_if(entries.begin(), entries.end(),
                              [&](const Entry& e) { return e.name == span.name; });
    if (entry == entries.end()) entry = entries.insert(entry, {.name = span.name});
    ++entry->count;
    const int64_t from_ns = std::max(busy_until_ns, span.start_ns);
    entry->idle_us += static_cast<double>(from_ns - busy_until_ns) / 1e3;
    entry->busy_us += static_cast<double>(std::max<int64_t>(0, span.end_ns - from_ns)) / 1e3;
    busy_until_ns = std::max(busy_until_ns, span.end_ns);
  }
  std::string text = "   count  busy us  idle before  kernel\n";
  for (const Entry& entry : entries) {
    absl::StrAppendFormat(&text, "  %6d  %7.2f  %11.2f  %s\n", entry.count,
                          entry.busy_us / entry.count, entry.idle_us / entry.count, entry.name);
  }
  return text;
}

}  // namespace writescope::bench
