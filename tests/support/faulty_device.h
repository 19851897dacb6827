// The CPU device with faults that a test switches on: a flag that gets lost on its way, a compute
// queue that is broken.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "engine/device/cpu/cpu_device.h"

namespace writescope::testing {

// Passes everything on to another device; while `lose_flags` is set, flags of its compute queue are
// not. While `is_broken` is set nothing of that queue is ever done, and waiting for it says so at
// once. Thread-safe as the device is.
class FaultyDevice final : public device::CpuDevice {
 public:
  explicit FaultyDevice(std::unique_ptr<device::CpuDevice> inner)
      : inner_(std::move(inner)), compute_(*this) {}

  std::atomic<bool> lose_flags{false};
  std::atomic<bool> is_broken{false};

  std::string name() const override { return inner_->name(); }
  absl::StatusOr<device::Buffer> AllocateDevice(int64_t size_bytes,
                                                std::string_view label) override {
    return inner_->AllocateDevice(size_bytes, label);
  }
  absl::StatusOr<device::Buffer> AllocateHost(int64_t size_bytes, device::HostMemory kind,
                                              std::string_view label) override {
    return inner_->AllocateHost(size_bytes, kind, label);
  }
  int64_t device_budget_bytes() const override { return inner_->device_budget_bytes(); }
  int64_t device_used_bytes() const override { return inner_->device_used_bytes(); }
  device::CpuQueue& compute() override { return compute_; }
  device::Queue& upload() override { return inner_->upload(); }
  device::Queue& download() override { return inner_->download(); }
  ParallelFor& team() override { return inner_->team(); }
  device::LinkInfo link() const override { return inner_->link(); }
  absl::Status SetLinkPace(double pace) override { return inner_->SetLinkPace(pace); }

 private:
  class Compute final : public device::CpuQueue {
   public:
    explicit Compute(FaultyDevice& owner) : owner_(owner) {}
    std::string_view name() const override { return queue().name(); }
    void Launch(std::function<void()> work) override { queue().Launch(std::move(work)); }
    device::Event Record() override { return {this, queue().Record().ticket}; }
    void WaitFor(device::Event event) override { queue().WaitFor(event); }
    void Copy(std::byte* to, const std::byte* from, int64_t size_bytes) override {
      queue().Copy(to, from, size_bytes);
    }
    void Zero(std::byte* to, int64_t size_bytes) override { queue().Zero(to, size_bytes); }
    void ZeroRows(std::byte* to, int64_t row_bytes, int64_t stride_bytes,
                  int64_t num_rows) override {
      queue().ZeroRows(to, row_bytes, stride_bytes, num_rows);
    }
    void RecordTime(double* seconds) override { queue().RecordTime(seconds); }
    void SetFlag(std::atomic<uint64_t>* flag, uint64_t value) override {
      if (!owner_.lose_flags) queue().SetFlag(flag, value);
    }
    void WaitFlag(const std::atomic<uint64_t>* flag, uint64_t value, absl::Duration timeout,
                  device::WaitTimes* times) override {
      queue().WaitFlag(flag, value, timeout, times);
    }
    uint64_t completed_ticket() const override {
      return owner_.is_broken ? 0 : queue().completed_ticket();
    }
    absl::Status WaitTicket(uint64_t ticket, absl::Duration timeout) const override {
      if (owner_.is_broken) return absl::InternalError("queue compute is broken");
      return queue().WaitTicket(ticket, timeout);
    }
    absl::Status TakeError() override { return queue().TakeError(); }
    bool failed() const override { return queue().failed(); }

   private:
    device::CpuQueue& queue() const { return owner_.inner_->compute(); }
    FaultyDevice& owner_;
  };

  std::unique_ptr<device::CpuDevice> inner_;
  Compute compute_;
};

}  // namespace writescope::testing
