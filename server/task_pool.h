// A few threads for work that is too long for gRPC's own: parsing and tokenising prompts.
#pragma once

#include <cstddef>
#include <functional>
#include <thread>
#include <vector>

#include "engine/base/bounded_queue.h"

namespace writescope::server {

// Messages from this size on are read one at a time, by a thread of their own: to tokenise tens of
// MiB takes seconds and dozens of times their size in memory, and short prompts must not wait
// behind them.
inline constexpr size_t kLargeMessageBytes = size_t{1} << 20;

// Thread-safe.
class TaskPool {
 public:
  TaskPool(int num_threads, size_t max_waiting);
  ~TaskPool();
  // `message_bytes` is the size of what the task reads. False when too many wait already, or after
  // Stop.
  bool Run(size_t message_bytes, std::function<void()> task);
  // Finishes what waits, then ends the threads.
  void Stop();

 private:
  BoundedQueue<std::function<void()>> tasks_;
  BoundedQueue<std::function<void()>> large_tasks_;
  std::vector<std::thread> threads_;
};

}  // namespace writescope::server
