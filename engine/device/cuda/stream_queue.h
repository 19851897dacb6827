// An ordered queue as a CUDA stream.
//
// A ticket is done when the stream has stored its number into a page-locked word, so looking is a
// load, from any thread, and a wait of another stream is one memory operation.
#pragma once

#include <cuda.h>

#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "engine/device/cuda/cuda_device.h"
#include "engine/device/cuda/device_clock.h"
#include "engine/device/cuda/queue_kernels.h"

namespace writescope::device {

// Driver calls that the runtime library does not offer; found at run time, so that nothing links
// against the driver.
struct StreamMemoryOps {
  CUresult (*write64)(CUstream, CUdeviceptr, cuuint64_t, unsigned) = nullptr;
  CUresult (*wait64)(CUstream, CUdeviceptr, cuuint64_t, unsigned) = nullptr;
};

class StreamQueue final : public CudaQueue {
 public:
  StreamQueue(std::string name, DeviceClock& clock) : name_(std::move(name)), clock_(clock) {}
  ~StreamQueue() override;
  // `argument_bytes` is the size of the ring behind StageArguments; 0 for none. `is_awaited`: other
  // queues wait for this one again and again, beside copies.
  absl::Status Init(const StreamMemoryOps& ops, FlagWaits waits, int64_t argument_bytes,
                    bool is_awaited);

  std::string_view name() const override { return name_; }
  Event Record() override;
  void WaitFor(Event event) override;
  void Copy(std::byte* to, const std::byte* from, int64_t size_bytes) override;
  void Zero(std::byte* to, int64_t size_bytes) override;
  void ZeroRows(std::byte* to, int64_t row_bytes, int64_t stride_bytes, int64_t num_rows) override;
  void RecordTime(double* seconds) override;
  void WriteTimes() const override;
  void SetFlag(std::atomic<uint64_t>* flag, uint64_t value) override;
  void WaitFlag(const std::atomic<uint64_t>* flag, uint64_t value, absl::Duration timeout,
                WaitTimes* times) override;
  uint64_t completed_ticket() const override;
  absl::Status WaitTicket(uint64_t ticket, absl::Duration timeout) const override;
  absl::Status TakeError() override;
  bool failed() const override;

  cudaStream_t stream() const override { return capturing_ ? capture_stream_ : stream_; }
  absl::Status BeginCapture() override;
  absl::StatusOr<std::unique_ptr<CapturedWork>> EndCapture() override;
  std::byte* StageArguments(int64_t size_bytes) override;
  bool waits_by_kernel() const override { return waits_ == FlagWaits::kStream; }
  const uint32_t* failed_word() const override { return failed_word_; }
  uint32_t* counter_word() const override { return failed_word_ + 1; }
  uint64_t* AddStamp(double* seconds) override;
  void Check(cudaError_t error, const char* what) override;
  void Check(const absl::Status& status) override;

 private:
  // Of an event, or of a kernel that stamps.
  struct PendingTime {
    cudaEvent_t event = nullptr;
    const uint64_t* stamp = nullptr;
    double* seconds = nullptr;
  };
  void WaitFlagHere(const std::atomic<uint64_t>* flag, uint64_t value, absl::Duration timeout);
  bool Passed(const PendingTime& pending) const;
  void CheckDriver(CUresult result, const char* what);
  void SetError(absl::Status status);

  const std::string name_;
  DeviceClock& clock_;
  StreamMemoryOps ops_;
  FlagWaits waits_ = FlagWaits::kStream;
  cudaStream_t stream_ = nullptr;
  QueueWords* words_ = nullptr;  // Mapped
  // Device, or null: words_->completed as other queues see it, who would have to ask for that over
  // the link and behind what is on its way there.
  uint64_t* completed_here_ = nullptr;
  uint32_t* failed_word_ = nullptr;  // Device, and behind it the counter
  // Of the submitting thread. A stream of its own, so that other threads can look at stream_.
  cudaStream_t capture_stream_ = nullptr;
  bool capturing_ = false;
  absl::Status capture_error_;
  absl::Duration flag_timeout_;  // Of the last WaitFlag, for the message
  std::atomic<uint64_t> last_ticket_{0};

  // A ring of segments; one is reused after its event.
  std::byte* arguments_ = nullptr;  // Mapped
  std::vector<Event> segments_;
  int segment_ = 0;
  int64_t segment_used_ = 0;

  mutable std::mutex mutex_;
  absl::Status error_;  // Guarded by mutex_, like those below
  mutable std::deque<PendingTime> pending_times_;
  mutable std::vector<cudaEvent_t> free_events_;
  // Mapped, a ring: the device's nanoseconds, 0 until a kernel has stored them.
  uint64_t* stamps_ = nullptr;
  int64_t num_stamps_ = 0;
  mutable int64_t pending_stamps_ = 0;
  std::atomic<bool> broken_{false};  // A CUDA call failed; the context may be lost
};

}  // namespace writescope::device
