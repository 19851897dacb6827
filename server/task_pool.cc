#include "server/task_pool.h"

#include <malloc.h>

#include <optional>
#include <utility>

namespace writescope::server {

TaskPool::TaskPool(int num_threads, size_t max_waiting)
    : tasks_(max_waiting), large_tasks_(max_waiting) {
  for (int i = 0; i < num_threads; ++i) {
    threads_.emplace_back([this] {
      while (std::optional<std::function<void()>> task = tasks_.Pop()) (*task)();
    });
  }
  threads_.emplace_back([this] {
    while (std::optional<std::function<void()>> task = large_tasks_.Pop()) {
      (*task)();
      task.reset();
      // What it took goes back to the system; the allocator would keep it for this thread.
      malloc_trim(0);
    }
  });
}

TaskPool::~TaskPool() { Stop(); }

bool TaskPool::Run(size_t message_bytes, std::function<void()> task) {
  return (message_bytes < kLargeMessageBytes ? tasks_ : large_tasks_).TryPush(std::move(task));
}

void TaskPool::Stop() {
  tasks_.Close();
  large_tasks_.Close();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

}  // namespace writescope::server
