// The threads that run CPU attention, entered once a step.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "absl/time/time.h"

namespace writescope::attention {

// Workers of a process that may use so many cores: two are left to the engine's thread and all
// else, since threads that spin on the whole of a cgroup's quota get the process throttled.
constexpr int DefaultWorkers(int usable_cores) { return usable_cores > 3 ? usable_cores - 2 : 1; }

// Engine thread. No two workers are promised to run at the same time, so a body must not wait for
// another.
class WorkerTeam {
 public:
  // On a oneTBB arena; with the thread sanitizer, which does not see inside the packaged oneTBB, on
  // std::thread.
  static std::unique_ptr<WorkerTeam> Create(int num_workers);
  static std::unique_ptr<WorkerTeam> CreateTbb(int num_workers);
  static std::unique_ptr<WorkerTeam> CreateThreads(int num_workers);
  virtual ~WorkerTeam() = default;

  virtual int num_workers() const = 0;
  // Starts body(worker) for each worker in [0, count), which is 1 to num_workers(), the default.
  // The last start must have ended.
  virtual void Start(int count, std::function<void(int worker)> body) = 0;
  void Start(std::function<void(int worker)> body) { Start(num_workers(), std::move(body)); }
  // Whether every body has returned, within `timeout`.
  virtual bool AwaitDone(absl::Duration timeout) = 0;
};

}  // namespace writescope::attention
