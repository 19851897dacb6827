#include "engine/device/cpu/cpu_device.h"

#include <sys/mman.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/units.h"
#include "engine/device/cpu/thread_queue.h"

namespace writescope::device {
namespace {

constexpr int64_t kPageBytes = 4096;

// Bytes given out of a limit. Thread-safe.
class Budget {
 public:
  Budget(std::string name, int64_t limit_bytes) : name_(std::move(name)), limit_(limit_bytes) {}

  // A mapping of its own, zeroed and touched, so that memory promised is memory there.
  absl::StatusOr<Buffer> Allocate(int64_t size_bytes, std::string_view label, bool huge_pages) {
    if (size_bytes <= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(name_, " memory for ", std::string(label), ": ", size_bytes, " bytes"));
    }
    const int64_t mapped_bytes = RoundUp(size_bytes, kPageBytes);
    std::lock_guard lock(mutex_);
    if (limit_ > 0 && used_ + mapped_bytes > limit_) {
      return absl::ResourceExhaustedError(absl::StrCat(
          name_, " memory for ", std::string(label), " needs ", mapped_bytes, " bytes; ",
          limit_ - used_, " of the budget of ", limit_, " bytes are left"));
    }
    void* data = mmap(nullptr, static_cast<size_t>(mapped_bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat(name_, " memory for ", std::string(label),
                                                       ": cannot map ", mapped_bytes,
                                                       " bytes: ", std::strerror(errno)));
    }
    if (huge_pages) madvise(data, static_cast<size_t>(mapped_bytes), MADV_HUGEPAGE);
    std::memset(data, 0, static_cast<size_t>(mapped_bytes));
    used_ += mapped_bytes;
    return Buffer(static_cast<std::byte*>(data), size_bytes, &Budget::Release, this);
  }

  int64_t limit_bytes() const { return limit_; }
  int64_t used_bytes() const {
    std::lock_guard lock(mutex_);
    return used_;
  }

 private:
  static void Release(void* context, std::byte* data, int64_t size_bytes) {
    auto* budget = static_cast<Budget*>(context);
    const int64_t mapped_bytes = RoundUp(size_bytes, kPageBytes);
    munmap(data, static_cast<size_t>(mapped_bytes));
    std::lock_guard lock(budget->mutex_);
    budget->used_ -= mapped_bytes;
  }

  const std::string name_;
  const int64_t limit_;
  mutable std::mutex mutex_;
  int64_t used_ = 0;
};

class CpuDeviceImpl final : public CpuDevice {
 public:
  explicit CpuDeviceImpl(const CpuDeviceOptions& options)
      : device_memory_("device", options.budget_bytes),
        host_memory_("host", options.host_budget_bytes),
        team_(options.compute_threads),
        pace_(options.link_bytes_per_s),
        compute_("compute", nullptr),
        upload_("upload", &pace_),
        download_("download", &pace_) {}
  ~CpuDeviceImpl() override {
    // Work of one queue may wait for an event of another; all have run before the first queue goes.
    AwaitIdle({&compute_, &upload_, &download_}, "device");
  }

  std::string name() const override { return "cpu"; }
  absl::StatusOr<Buffer> AllocateDevice(int64_t size_bytes, std::string_view label) override {
    return device_memory_.Allocate(size_bytes, label, /*huge_pages=*/true);
  }
  absl::StatusOr<Buffer> AllocateHost(int64_t size_bytes, HostMemory,
                                      std::string_view label) override {
    // No page is locked: a link that is a thread reads any memory at one speed.
    return host_memory_.Allocate(size_bytes, label, /*huge_pages=*/true);
  }
  int64_t device_budget_bytes() const override { return device_memory_.limit_bytes(); }
  int64_t device_used_bytes() const override { return device_memory_.used_bytes(); }
  CpuQueue& compute() override { return compute_; }
  Queue& upload() override { return upload_; }
  Queue& download() override { return download_; }
  ParallelFor& team() override { return team_; }
  LinkInfo link() const override {
    return {.simulated = true, .pace_bytes_per_s = pace_.load(std::memory_order_relaxed)};
  }
  absl::Status SetLinkPace(double bytes_per_s) override {
    if (!std::isfinite(bytes_per_s) || bytes_per_s < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("a link pace of ", bytes_per_s, " bytes per second"));
    }
    pace_.store(bytes_per_s, std::memory_order_relaxed);
    return absl::OkStatus();
  }

 private:
  Budget device_memory_;
  Budget host_memory_;
  ParallelFor team_;
  std::atomic<double> pace_;
  ThreadQueue compute_;
  ThreadQueue upload_;
  ThreadQueue download_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CpuDevice>> CpuDevice::Create(const CpuDeviceOptions& options) {
  if (options.budget_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a device memory budget of ", options.budget_bytes, " bytes"));
  }
  if (options.compute_threads < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.compute_threads, " compute threads; at least 1 is needed"));
  }
  if (!std::isfinite(options.link_bytes_per_s) || options.link_bytes_per_s < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a link pace of ", options.link_bytes_per_s, " bytes per second"));
  }
  return std::make_unique<CpuDeviceImpl>(options);
}

}  // namespace writescope::device
