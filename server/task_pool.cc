#include "server/task_pool.h"

#include <optional>
#include <utility>

namespace writescope::server {

TaskPool::TaskPool(int num_threads, size_t max_waiting) : tasks_(max_waiting) {
  for (int i = 0; i < num_threads; ++i) {
    threads_.emplace_back([this] {
      while (std::optional<std::function<void()>> task = tasks_.Pop()) (*task)();
    });
  }
}

TaskPool::~TaskPool() { Stop(); }

bool TaskPool::Run(std::function<void()> task) { return tasks_.TryPush(std::move(task)); }

void TaskPool::Stop() {
  tasks_.Close();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

}  // namespace writescope::server
