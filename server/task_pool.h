// A few threads for work that is too long for gRPC's own: parsing and tokenising prompts.
#pragma once

#include <functional>
#include <thread>
#include <vector>

#include "engine/base/bounded_queue.h"

namespace writescope::server {

// Thread-safe.
class TaskPool {
 public:
  TaskPool(int num_threads, size_t max_waiting);
  ~TaskPool();
  // False when too many wait already, or after Stop.
  bool Run(std::function<void()> task);
  // Finishes what waits, then ends the threads.
  void Stop();

 private:
  BoundedQueue<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
};

}  // namespace writescope::server
