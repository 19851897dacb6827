#include "engine/attention/worker_team.h"

#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "engine/base/check.h"
#include "engine/base/log.h"
#include "engine/base/timed_wait.h"

namespace writescope::attention {
namespace {

// Counts bodies that have not returned.
class Running {
 public:
  void Set(int count) {
    std::lock_guard lock(mutex_);
    CHECK_EQ(count_, 0) << "workers of the last step still run";
    count_ = count;
  }
  void Done() {
    std::lock_guard lock(mutex_);
    if (--count_ == 0) idle_.notify_all();
  }
  bool Await(absl::Duration timeout) {
    std::unique_lock lock(mutex_);
    return TimedWait(idle_, lock, timeout, [&] { return count_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable idle_;
  int count_ = 0;
};

class TbbTeam final : public WorkerTeam {
 public:
  explicit TbbTeam(int num_workers)
      : num_workers_(num_workers),
        // oneTBB makes one thread fewer than this; by default as many as the host has cores, which
        // may be more or fewer than the workers asked for.
        limit_(tbb::global_control::max_allowed_parallelism, static_cast<size_t>(num_workers) + 1),
        arena_(num_workers, /*reserved_for_masters=*/0) {}
  ~TbbTeam() override {
    // A body that is not over uses what is about to go.
    while (!running_.Await(absl::Seconds(10))) {
      Log(LogLevel::kError, "a CPU worker does not end", {{"workers", num_workers_}});
    }
  }

  int num_workers() const override { return num_workers_; }
  using WorkerTeam::Start;
  void Start(int count, std::function<void(int)> body) override {
    CHECK(count >= 1 && count <= num_workers_) << count << " workers of " << num_workers_;
    // Before the body is touched: a worker of the last step may be calling it.
    running_.Set(count);
    body_ = std::move(body);
    for (int worker = 0; worker < count; ++worker) {
      arena_.enqueue([this, worker] {
        body_(worker);
        running_.Done();
      });
    }
  }
  bool AwaitDone(absl::Duration timeout) override { return running_.Await(timeout); }

 private:
  const int num_workers_;
  tbb::global_control limit_;
  tbb::task_arena arena_;
  std::function<void(int)> body_;
  Running running_;
};

class ThreadTeam final : public WorkerTeam {
 public:
  explicit ThreadTeam(int num_workers) {
    for (int worker = 0; worker < num_workers; ++worker) {
      threads_.emplace_back([this, worker] { Loop(worker); });
    }
  }
  ~ThreadTeam() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int num_workers() const override { return static_cast<int>(threads_.size()); }
  using WorkerTeam::Start;
  void Start(int count, std::function<void(int)> body) override {
    CHECK(count >= 1 && count <= num_workers()) << count << " workers of " << num_workers();
    running_.Set(count);
    {
      std::lock_guard lock(mutex_);
      body_ = std::move(body);
      count_ = count;
      ++generation_;
    }
    wake_.notify_all();
  }
  bool AwaitDone(absl::Duration timeout) override { return running_.Await(timeout); }

 private:
  void Loop(int worker) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
      if (generation_ == seen) return;
      seen = generation_;
      if (worker >= count_) continue;
      lock.unlock();
      body_(worker);
      running_.Done();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  uint64_t generation_ = 0;
  int count_ = 0;  // Of workers that the generation is of
  std::function<void(int)> body_;
  Running running_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<WorkerTeam> WorkerTeam::CreateTbb(int num_workers) {
  return std::make_unique<TbbTeam>(num_workers);
}

std::unique_ptr<WorkerTeam> WorkerTeam::CreateThreads(int num_workers) {
  return std::make_unique<ThreadTeam>(num_workers);
}

std::unique_ptr<WorkerTeam> WorkerTeam::Create(int num_workers) {
#if defined(__SANITIZE_THREAD__)
  return CreateThreads(num_workers);
#else
  return CreateTbb(num_workers);
#endif
}

}  // namespace writescope::attention
