#include "engine/base/parallel_for.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/base/check.h"

namespace writescope {

struct ParallelFor::Team {
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable idle;
  uint64_t generation = 0;
  int running = 0;
  bool stop = false;
  int64_t count = 0;
  const std::function<void(int64_t, int)>* body = nullptr;
  std::atomic<int64_t> next{0};
  std::vector<std::thread> threads;

  void Work(int thread) {
    while (true) {
      const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= count) return;
      (*body)(item, thread);
    }
  }

  void Helper(int thread) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex);
    while (true) {
      wake.wait(lock, [&] { return stop || generation != seen; });
      if (stop) return;
      seen = generation;
      lock.unlock();
      Work(thread);
      lock.lock();
      if (--running == 0) idle.notify_one();
    }
  }
};

ParallelFor::ParallelFor(int num_threads) : num_threads_(num_threads), team_(new Team) {
  CHECK_GE(num_threads, 1);
  for (int i = 1; i < num_threads; ++i) {
    team_->threads.emplace_back([this, i] { team_->Helper(i); });
  }
}

ParallelFor::~ParallelFor() {
  {
    std::lock_guard lock(team_->mutex);
    team_->stop = true;
  }
  team_->wake.notify_all();
  for (std::thread& thread : team_->threads) thread.join();
}

void ParallelFor::Run(int64_t count, const std::function<void(int64_t, int)>& body) {
  if (count <= 0) return;
  if (num_threads_ == 1 || count == 1) {
    for (int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
  Team& team = *team_;
  {
    std::lock_guard lock(team.mutex);
    team.count = count;
    team.body = &body;
    team.next.store(0, std::memory_order_relaxed);
    team.running = num_threads_ - 1;
    ++team.generation;
  }
  team.wake.notify_all();
  team.Work(0);
  std::unique_lock lock(team.mutex);
  team.idle.wait(lock, [&] { return team.running == 0; });
}

}  // namespace writescope
