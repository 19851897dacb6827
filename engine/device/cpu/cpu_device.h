// The CPU device: a budgeted arena for device memory, a thread for each ordered queue, and a link
// whose copies a thread makes at a settable pace. It computes real answers; only its speed is that
// of a CPU.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "engine/base/parallel_for.h"
#include "engine/device/device.h"

namespace writescope::device {

struct CpuDeviceOptions {
  int64_t budget_bytes = 0;       // Device memory; the arena of a simulated card.
  int64_t host_budget_bytes = 0;  // Host memory; 0 is without a limit of our own.
  int compute_threads = 1;        // Of the compute queue, its own thread included.
  double link_bytes_per_s = 0;    // 0: as fast as memory.
};

// A queue whose work is closures, run in order by one thread.
class CpuQueue : public Queue {
 public:
  virtual void Launch(std::function<void()> work) = 0;
};

class CpuDevice : public Device {
 public:
  static absl::StatusOr<std::unique_ptr<CpuDevice>> Create(const CpuDeviceOptions& options);

  CpuQueue& compute() override = 0;
  // The team that closures on compute() may use, and only they.
  virtual ParallelFor& team() = 0;
};

}  // namespace writescope::device
