// The CPU device with faults that a test switches on: a flag that gets lost on its way, a compute
// or upload queue that is broken.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/device/cpu/cpu_device.h"

namespace writescope::testing {

// Passes everything on to another device; while `lose_flags` is set, flags of its compute queue are
// not. While `is_broken` is set nothing of that queue is ever done, and waiting for it says so at
// once; `upload_is_broken` likewise. Thread-safe as the device is.
class FaultyDevice final : public device::CpuDevice {
 public:
  explicit FaultyDevice(std::unique_ptr<device::CpuDevice> inner)
      : inner_(std::move(inner)), compute_(*this), upload_(inner_->upload(), upload_is_broken) {}

  std::atomic<bool> lose_flags{false};
  std::atomic<bool> is_broken{false};
  std::atomic<bool> upload_is_broken{false};

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
  device::Queue& upload() override { return upload_; }
  device::Queue& download() override { return inner_->download(); }
  ParallelFor& team() override { return inner_->team(); }
  device::LinkInfo link() const override { return inner_->link(); }
  absl::Status SetLinkPace(double pace) override { return inner_->SetLinkPace(pace); }

 private:
  // Passes on what a queue of the inner device is told.
  template <typename Interface>
  class PassingQueue : public Interface {
   public:
    PassingQueue(Interface& inner, const std::atomic<bool>& is_broken)
        : inner_(inner), is_broken_(is_broken) {}
    std::string_view name() const override { return inner_.name(); }
    device::Event Record() override { return {this, inner_.Record().ticket}; }
    void WaitFor(device::Event event) override { inner_.WaitFor(event); }
    void Copy(std::byte* to, const std::byte* from, int64_t size_bytes) override {
      if (!is_broken_) inner_.Copy(to, from, size_bytes);
    }
    void Zero(std::byte* to, int64_t size_bytes) override { inner_.Zero(to, size_bytes); }
    void ZeroRows(std::byte* to, int64_t row_bytes, int64_t stride_bytes,
                  int64_t num_rows) override {
      inner_.ZeroRows(to, row_bytes, stride_bytes, num_rows);
    }
    void RecordTime(double* seconds) override { inner_.RecordTime(seconds); }
    void SetFlag(std::atomic<uint64_t>* flag, uint64_t value) override {
      inner_.SetFlag(flag, value);
    }
    void WaitFlag(const std::atomic<uint64_t>* flag, uint64_t value, absl::Duration timeout,
                  device::WaitTimes* times) override {
      inner_.WaitFlag(flag, value, timeout, times);
    }
    uint64_t completed_ticket() const override {
      return is_broken_ ? 0 : inner_.completed_ticket();
    }
    absl::Status WaitTicket(uint64_t ticket, absl::Duration timeout) const override {
      if (is_broken_)
        return absl::InternalError(absl::StrCat("queue ", std::string(name()), " is broken"));
      return inner_.WaitTicket(ticket, timeout);
    }
    absl::Status TakeError() override { return inner_.TakeError(); }
    bool failed() const override { return inner_.failed(); }

   protected:
    Interface& inner_;

   private:
    const std::atomic<bool>& is_broken_;
  };
  class Compute final : public PassingQueue<device::CpuQueue> {
   public:
    explicit Compute(FaultyDevice& owner)
        : PassingQueue(owner.inner_->compute(), owner.is_broken), lose_flags_(owner.lose_flags) {}
    void Launch(std::function<void()> work) override { inner_.Launch(std::move(work)); }
    void SetFlag(std::atomic<uint64_t>* flag, uint64_t value) override {
      if (!lose_flags_) inner_.SetFlag(flag, value);
    }

   private:
    const std::atomic<bool>& lose_flags_;
  };

  std::unique_ptr<device::CpuDevice> inner_;
  Compute compute_;
  PassingQueue<device::Queue> upload_;
};

}  // namespace writescope::testing
