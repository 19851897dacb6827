// When kernels ran on the GPU, as CUDA's profiling interface (CUPTI) records it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace writescope::bench {

struct KernelSpan {
  std::string name;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  uint64_t launch = 0;  // The same for all kernels of one launch of a graph
};

// The time in which at least one kernel ran: what overlaps counts once.
double BusySeconds(std::vector<KernelSpan> spans);
// Within launches of graphs, of the time of them all: the share in which no kernel ran.
double IdleShareInLaunches(const std::vector<KernelSpan>& spans);

// By name, in the order of first appearance: how often, and the mean microseconds by which each
// extends the time that kernels have been busy, and in which nothing ran before it.
std::string KernelTable(std::vector<KernelSpan> spans);

// Records every kernel of the process between Begin and End. One at a time; one thread.
class KernelTimes {
 public:
  // Fails where the library is not installed, or this program was built without it.
  static absl::StatusOr<std::unique_ptr<KernelTimes>> Create();
  virtual ~KernelTimes() = default;

  virtual absl::Status Begin() = 0;
  // The device has finished all that was submitted.
  virtual absl::StatusOr<std::vector<KernelSpan>> End() = 0;
};

}  // namespace writescope::bench
