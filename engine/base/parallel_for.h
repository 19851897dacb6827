// A small fixed team of threads for the CPU device's own compute.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace writescope {

// Runs loops over a fixed number of threads, the caller among them. One loop at a time: Run is
// called by one thread (the device's compute queue). Between loops the helpers sleep.
class ParallelFor {
 public:
  explicit ParallelFor(int num_threads);
  ~ParallelFor();
  ParallelFor(const ParallelFor&) = delete;
  ParallelFor& operator=(const ParallelFor&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls body(i, thread) for i in [0, count), thread in [0, num_threads); returns when all are
  // done. Items are claimed one at a time, in rising order.
  void Run(int64_t count, const std::function<void(int64_t item, int thread)>& body);

 private:
  struct Team;
  int num_threads_;
  std::unique_ptr<Team> team_;
};

}  // namespace writescope
