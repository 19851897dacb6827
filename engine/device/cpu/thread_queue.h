// An ordered queue as a thread that runs closures, with a pace for those that are copies over a
// link.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "engine/device/cpu/cpu_device.h"

namespace writescope::device {

class ThreadQueue final : public CpuQueue {
 public:
  // `pace` (bytes per second, 0 for none) applies to Copy and may change at any time; null: no
  // pace.
  ThreadQueue(std::string name, const std::atomic<double>* pace);
  ~ThreadQueue() override;

  std::string_view name() const override { return name_; }
  void Launch(std::function<void()> work) override;
  Event Record() override;
  void WaitFor(Event event) override;
  void Copy(std::byte* to, const std::byte* from, int64_t size_bytes) override;
  void Zero(std::byte* to, int64_t size_bytes) override;
  void ZeroRows(std::byte* to, int64_t row_bytes, int64_t stride_bytes, int64_t num_rows) override;
  void RecordTime(double* seconds) override;
  void SetFlag(std::atomic<uint64_t>* flag, uint64_t value) override;
  void WaitFlag(const std::atomic<uint64_t>* flag, uint64_t value, absl::Duration timeout,
                WaitTimes* times) override;
  uint64_t completed_ticket() const override { return completed_.load(std::memory_order_acquire); }
  absl::Status WaitTicket(uint64_t ticket, absl::Duration timeout) const override;
  absl::Status TakeError() override;
  bool failed() const override { return failed_.load(std::memory_order_acquire); }

 private:
  void Run();
  void AwaitFlag(const std::atomic<uint64_t>& flag, uint64_t value, absl::Duration timeout);
  void SetError(absl::Status status);
  void PacedCopy(std::byte* to, const std::byte* from, int64_t size_bytes, double submitted_s);

  const std::string name_;
  const std::atomic<double>* const pace_;
  // Queue thread only: when the copies so far are through at their pace, and when the last wait for
  // another queue ended.
  double link_free_at_s_ = 0;
  double not_before_s_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable submitted_;
  mutable std::condition_variable done_;
  std::deque<std::function<void()>> work_;  // Guarded by mutex_, like the three below.
  uint64_t last_ticket_ = 0;
  bool stop_ = false;
  absl::Status error_;
  std::atomic<bool> failed_{false};  // Whether error_ is one
  std::atomic<uint64_t> completed_{0};
  std::thread thread_;
};

}  // namespace writescope::device
