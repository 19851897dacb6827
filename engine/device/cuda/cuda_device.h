// A CUDA GPU and its link. Everything large is allocated at start; serving submits to three
// streams.
//
// Streams of copies never wait for the CPU; the compute stream waits for CPU flags by a kernel of
// one thread block that gives up in time, or (see FlagWaits) by the submitting thread.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/device/device.h"

namespace writescope::device {

// Who waits for a flag that the CPU sets.
enum class FlagWaits {
  kAuto,    // kStream, but kCaller under tools that serialise the GPU
  kStream,  // The stream, by a kernel that polls: the caller submits ahead
  kCaller,  // The submitting thread: nothing on the GPU ever waits for the CPU
};

// What BeginCapture and EndCapture kept, ready to be launched at once. Must not outlive its queue.
class CapturedWork {
 public:
  explicit CapturedWork(cudaGraphExec_t graph) : graph_(graph) {}
  ~CapturedWork() { cudaGraphExecDestroy(graph_); }
  CapturedWork(const CapturedWork&) = delete;
  CapturedWork& operator=(const CapturedWork&) = delete;
  cudaGraphExec_t graph() const { return graph_; }

 private:
  cudaGraphExec_t graph_;
};

class CudaQueue : public Queue {
 public:
  // Where kernels are launched; between BeginCapture and EndCapture a stream that keeps them.
  virtual cudaStream_t stream() const = 0;
  // What the submitting thread launches on stream() from here on is kept and not run. Everything
  // else of the queue goes on as ever. EndCapture gives the first error of the launches, too; they
  // leave no other trace.
  virtual absl::Status BeginCapture() = 0;
  virtual absl::StatusOr<std::unique_ptr<CapturedWork>> EndCapture() = 0;
  // Page-locked memory of `size_bytes` (at most kMaxArgumentBytes), aligned to 64, that kernels
  // submitted next may read where it lies. It is reused once what was submitted before a later call
  // is done. Submitting thread; while it captures this is an error of the capture.
  virtual std::byte* StageArguments(int64_t size_bytes) = 0;
  // Whether WaitFlag submits a kernel, behind which another can be launched early (launch.h), to
  // begin where the flag is seen; else the submitting thread waits itself.
  virtual bool waits_by_kernel() const = 0;
  // A word in device memory: not 0 from a wait that ran out until TakeError.
  virtual const uint32_t* failed_word() const = 0;
  // A word in device memory that is 0 between kernels of the queue: by it thread blocks of one find
  // out which of them is the last.
  virtual uint32_t* counter_word() const = 0;
  // Where a kernel that is submitted next stores its %globaltimer, which becomes *seconds as with
  // RecordTime; times are stored in the order of submission. Null where it is not asked for, or no
  // place is free.
  virtual uint64_t* AddStamp(double* seconds) = 0;
  // Remembers a failed call or launch; TakeError returns the first. `what` names it.
  virtual void Check(cudaError_t error, const char* what) = 0;
  // The same of a library that has errors of its own.
  virtual void Check(const absl::Status& status) = 0;
};

inline constexpr int64_t kMaxArgumentBytes = int64_t{1} << 20;

struct CudaDeviceOptions {
  int ordinal = 0;
  // Of everything this process takes on the device: the context and its modules, then allocations.
  int64_t budget_bytes = 0;
  int64_t host_budget_bytes = 0;  // 0: none
  // Where page-locking fails, go on with ordinary memory, which the link reads many times slower.
  bool allow_pageable = false;
  FlagWaits flag_waits = FlagWaits::kAuto;
};

struct CudaInfo {
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  int num_multiprocessors = 0;
  int64_t total_bytes = 0;
  int64_t context_bytes = 0;  // Counted against the budget before any allocation
  int numa_node = -1;
};

class CudaDevice : public Device {
 public:
  // NOT_FOUND without a GPU or driver; FAILED_PRECONDITION for one that lacks what is needed;
  // RESOURCE_EXHAUSTED when the budget is not free on it.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Create(const CudaDeviceOptions& options);

  CudaQueue& compute() override = 0;
  CudaQueue& upload() override = 0;
  CudaQueue& download() override = 0;
  virtual const CudaInfo& info() const = 0;
  virtual FlagWaits flag_waits() const = 0;
  // Memory that could not be page-locked; above 0 only with allow_pageable.
  virtual int64_t pageable_bytes() const = 0;
};

// The status of a CUDA call: OK, RESOURCE_EXHAUSTED for memory, INTERNAL otherwise. `what` names
// the call.
absl::Status CudaStatus(cudaError_t error, std::string_view what);

}  // namespace writescope::device
