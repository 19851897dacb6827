#include "engine/device/cuda/stream_queue.h"

#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/base/timed_wait.h"
#include "engine/base/units.h"

namespace writescope::device {
namespace {

constexpr int kSpins = 2000;
constexpr int kNapNs = 10'000;
// How often a longer wait asks the driver whether the context is still alive.
constexpr int kNapsPerLook = 100;
// More than a step has, so that each finds a place.
constexpr int64_t kStamps = 4096;
constexpr size_t kWordsBytes = 2 * sizeof(uint32_t);

CUdeviceptr DevicePointer(const void* at) { return reinterpret_cast<CUdeviceptr>(at); }

void Nap() {
  timespec nap{.tv_sec = 0, .tv_nsec = kNapNs};
  nanosleep(&nap, nullptr);
}

}  // namespace

absl::Status CudaStatus(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string text = absl::StrCat(std::string(what), ": ", cudaGetErrorString(error),
                                        " (CUDA error ", static_cast<int>(error), ")");
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(text);
  return absl::InternalError(text);
}

StreamQueue::~StreamQueue() {
  if (stream_ != nullptr) {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  if (capture_stream_ != nullptr) cudaStreamDestroy(capture_stream_);
  for (const PendingTime& pending : pending_times_) {
    if (pending.event != nullptr) cudaEventDestroy(pending.event);
  }
  for (cudaEvent_t event : free_events_) cudaEventDestroy(event);
  if (words_ != nullptr) cudaFreeHost(words_);
  if (stamps_ != nullptr) cudaFreeHost(stamps_);
  if (arguments_ != nullptr) cudaFreeHost(arguments_);
  if (failed_word_ != nullptr) cudaFree(failed_word_);
  if (completed_here_ != nullptr) cudaFree(completed_here_);
}

absl::Status StreamQueue::Init(const StreamMemoryOps& ops, FlagWaits waits, int64_t argument_bytes,
                               bool is_awaited) {
  ops_ = ops;
  waits_ = waits;
  RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                             absl::StrCat("the stream of queue ", name_)));
  void* words = nullptr;
  RETURN_IF_ERROR(
      CudaStatus(cudaHostAlloc(&words, 64, cudaHostAllocMapped), "page-locked words of a queue"));
  words_ = new (words) QueueWords();
  RETURN_IF_ERROR(CudaStatus(cudaMalloc(reinterpret_cast<void**>(&failed_word_), kWordsBytes),
                             "a queue's words"));
  RETURN_IF_ERROR(CudaStatus(cudaMemset(failed_word_, 0, kWordsBytes), "a queue's words"));
  if (is_awaited) {
    RETURN_IF_ERROR(
        CudaStatus(cudaMalloc(reinterpret_cast<void**>(&completed_here_), sizeof(uint64_t)),
                   "a queue's word"));
    RETURN_IF_ERROR(CudaStatus(cudaMemset(completed_here_, 0, sizeof(uint64_t)), "a queue's word"));
  }
  RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(nullptr), "a queue's words"));
  void* stamps = nullptr;
  RETURN_IF_ERROR(
      CudaStatus(cudaHostAlloc(&stamps, kStamps * sizeof(uint64_t), cudaHostAllocMapped),
                 "page-locked memory for times"));
  stamps_ = static_cast<uint64_t*>(stamps);
  if (argument_bytes > 0) {
    const int64_t segments = argument_bytes / kMaxArgumentBytes;
    CHECK(segments >= 2);
    void* arguments = nullptr;
    RETURN_IF_ERROR(CudaStatus(
        cudaHostAlloc(&arguments, static_cast<size_t>(argument_bytes), cudaHostAllocMapped),
        "page-locked memory for arguments"));
    arguments_ = static_cast<std::byte*>(arguments);
    segments_.resize(static_cast<size_t>(segments));
  }
  return absl::OkStatus();
}

Event StreamQueue::Record() {
  const uint64_t ticket = last_ticket_.fetch_add(1, std::memory_order_relaxed) + 1;
  for (const uint64_t* word : {completed_here_, &words_->completed}) {
    if (word == nullptr) continue;
    CheckDriver(ops_.write64(stream_, DevicePointer(word), ticket, 0), "cuStreamWriteValue64");
  }
  return Event{this, ticket};
}

void StreamQueue::WaitFor(Event event) {
  if (event.queue == this || event.Done()) return;
  const auto* other = static_cast<const StreamQueue*>(event.queue);
  const uint64_t* const word =
      other->completed_here_ != nullptr ? other->completed_here_ : &other->words_->completed;
  CheckDriver(ops_.wait64(stream_, DevicePointer(word), event.ticket, CU_STREAM_WAIT_VALUE_GEQ),
              "cuStreamWaitValue64");
}

void StreamQueue::Copy(std::byte* to, const std::byte* from, int64_t size_bytes) {
  Check(cudaMemcpyAsync(to, from, static_cast<size_t>(size_bytes), cudaMemcpyDefault, stream_),
        "cudaMemcpyAsync");
}

void StreamQueue::Zero(std::byte* to, int64_t size_bytes) {
  Check(cudaMemsetAsync(to, 0, static_cast<size_t>(size_bytes), stream_), "cudaMemsetAsync");
}

void StreamQueue::ZeroRows(std::byte* to, int64_t row_bytes, int64_t stride_bytes,
                           int64_t num_rows) {
  Check(cudaMemset2DAsync(to, static_cast<size_t>(stride_bytes), 0, static_cast<size_t>(row_bytes),
                          static_cast<size_t>(num_rows), stream_),
        "cudaMemset2DAsync");
}

void StreamQueue::RecordTime(double* seconds) {
  cudaEvent_t event = nullptr;
  std::lock_guard lock(mutex_);
  if (free_events_.empty()) {
    if (cudaEventCreate(&event) != cudaSuccess) return;
  } else {
    event = free_events_.back();
    free_events_.pop_back();
  }
  cudaEventRecord(event, stream_);
  pending_times_.push_back({.event = event, .seconds = seconds});
}

uint64_t* StreamQueue::AddStamp(double* seconds) {
  if (seconds == nullptr) return nullptr;
  std::lock_guard lock(mutex_);
  if (pending_stamps_ == kStamps) return nullptr;
  uint64_t* const stamp = stamps_ + num_stamps_++ % kStamps;
  *stamp = 0;
  ++pending_stamps_;
  pending_times_.push_back({.stamp = stamp, .seconds = seconds});
  return stamp;
}

bool StreamQueue::Passed(const PendingTime& pending) const {
  if (pending.event != nullptr) return cudaEventQuery(pending.event) == cudaSuccess;
  return __atomic_load_n(pending.stamp, __ATOMIC_ACQUIRE) != 0;
}

void StreamQueue::WriteTimes() const {
  std::lock_guard lock(mutex_);
  while (!pending_times_.empty() && Passed(pending_times_.front())) {
    const PendingTime pending = pending_times_.front();
    pending_times_.pop_front();
    if (pending.event != nullptr) {
      *pending.seconds = clock_.HostSeconds(pending.event);
      free_events_.push_back(pending.event);
    } else {
      *pending.seconds = clock_.HostSecondsOfStamp(*pending.stamp);
      --pending_stamps_;
    }
  }
}

void StreamQueue::SetFlag(std::atomic<uint64_t>* flag, uint64_t value) {
  // The write comes after a fence of the whole system: what earlier kernels stored is there first.
  CheckDriver(ops_.write64(stream_, DevicePointer(flag), value, 0), "cuStreamWriteValue64");
}

void StreamQueue::WaitFlag(const std::atomic<uint64_t>* flag, uint64_t value,
                           absl::Duration timeout, WaitTimes* times) {
  flag_timeout_ = timeout;
  if (waits_ == FlagWaits::kCaller) {
    if (times != nullptr) RecordTime(&times->began_s);
    WaitFlagHere(flag, value, timeout);
    if (times != nullptr) times->seen_s = NowSeconds();
    return;
  }
  // In the order in which they come.
  uint64_t* const began_ns = times == nullptr ? nullptr : AddStamp(&times->began_s);
  uint64_t* const seen_ns = times == nullptr ? nullptr : AddStamp(&times->seen_s);
  Check(LaunchWaitFlag(stream_,
                       {.flag = reinterpret_cast<const uint64_t*>(flag),
                        .value = value,
                        .timeout_ns = static_cast<uint64_t>(absl::ToInt64Nanoseconds(timeout)),
                        .failed = failed_word_,
                        .failed_host = &words_->failed,
                        .began_ns = began_ns,
                        .seen_ns = seen_ns}),
        "wait for a flag");
}

void StreamQueue::WaitFlagHere(const std::atomic<uint64_t>* flag, uint64_t value,
                               absl::Duration timeout) {
  if (failed()) return;
  WaitLimit limit(timeout, NowSeconds());
  while (flag->load(std::memory_order_acquire) < value) {
    if (limit.Passed(NowSeconds())) {
      std::atomic_ref(words_->failed).store(1, std::memory_order_release);
      Check(cudaMemsetAsync(failed_word_, 1, sizeof(uint32_t), stream_), "cudaMemsetAsync");
      return;
    }
    Nap();
  }
}

uint64_t StreamQueue::completed_ticket() const {
  return std::atomic_ref(words_->completed).load(std::memory_order_acquire);
}

absl::Status StreamQueue::WaitTicket(uint64_t ticket, absl::Duration timeout) const {
  WaitLimit limit(timeout, NowSeconds());
  for (int spin = 0, naps = 0; completed_ticket() < ticket;) {
    if (++spin < kSpins) {
      __builtin_ia32_pause();
      continue;
    }
    if (broken_.load(std::memory_order_acquire)) {
      return absl::InternalError(absl::StrCat("queue ", name_, " is broken"));
    }
    if (naps++ % kNapsPerLook == kNapsPerLook - 1) {
      const cudaError_t alive = cudaStreamQuery(stream_);
      if (alive != cudaSuccess && alive != cudaErrorNotReady) {
        return CudaStatus(alive, absl::StrCat("queue ", name_));
      }
    }
    if (limit.Passed(NowSeconds())) {
      return absl::DeadlineExceededError(absl::StrCat("queue ", name_, " did not reach ticket ",
                                                      ticket, " in ", absl::FormatDuration(timeout),
                                                      "; it is at ", completed_ticket()));
    }
    Nap();
  }
  WriteTimes();
  return absl::OkStatus();
}

absl::Status StreamQueue::BeginCapture() {
  CHECK(!capturing_);
  if (capture_stream_ == nullptr) {
    RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(&capture_stream_, cudaStreamNonBlocking),
                               "the stream that keeps work"));
  }
  // Relaxed: other threads may call what they like meanwhile, and kernels may be loaded.
  const cudaError_t error = cudaStreamBeginCapture(capture_stream_, cudaStreamCaptureModeRelaxed);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return CudaStatus(error, "cudaStreamBeginCapture");
  }
  capturing_ = true;
  capture_error_ = absl::OkStatus();
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CapturedWork>> StreamQueue::EndCapture() {
  CHECK(capturing_);
  capturing_ = false;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  cudaError_t error = cudaStreamEndCapture(capture_stream_, &graph);
  if (capture_error_.ok() && error == cudaSuccess) error = cudaGraphInstantiate(&ready, graph, 0);
  // Now, so that the first launch does not do it.
  if (ready != nullptr && error == cudaSuccess) error = cudaGraphUpload(ready, stream_);
  if (graph != nullptr) cudaGraphDestroy(graph);
  absl::Status status =
      capture_error_.ok() ? CudaStatus(error, "a graph of kernels") : capture_error_;
  if (status.ok()) return std::make_unique<CapturedWork>(ready);
  if (ready != nullptr) cudaGraphExecDestroy(ready);
  cudaGetLastError();
  return status;
}

void StreamQueue::Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) Check(CudaStatus(error, what));
}

void StreamQueue::Check(const absl::Status& status) {
  if (status.ok()) return;
  if (capturing_) {
    if (capture_error_.ok()) capture_error_ = status;
    return;
  }
  broken_.store(true, std::memory_order_release);
  SetError(absl::Status(status.code(), absl::StrCat("queue ", name_, ": ", status.message())));
}

void StreamQueue::CheckDriver(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  Check(absl::InternalError(absl::StrCat(what, ": CUDA driver error ", static_cast<int>(result))));
}

void StreamQueue::SetError(absl::Status status) {
  std::lock_guard lock(mutex_);
  if (error_.ok()) error_ = std::move(status);
}

bool StreamQueue::failed() const {
  return std::atomic_ref(words_->failed).load(std::memory_order_acquire) != 0 ||
         broken_.load(std::memory_order_acquire);
}

absl::Status StreamQueue::TakeError() {
  {
    std::lock_guard lock(mutex_);
    // A broken context stays broken: the error is told every time.
    if (!error_.ok()) return error_;
  }
  if (std::atomic_ref(words_->failed).load(std::memory_order_acquire) == 0) {
    const cudaError_t alive = cudaStreamQuery(stream_);
    if (alive == cudaSuccess || alive == cudaErrorNotReady) return absl::OkStatus();
    Check(alive, "the device");
    return CudaStatus(alive, absl::StrCat("queue ", name_));
  }
  // Whoever takes the error has waited for the queue, or is about to: nothing that looks at the
  // word is submitted in between.
  Check(cudaMemsetAsync(failed_word_, 0, sizeof(uint32_t), stream_), "cudaMemsetAsync");
  Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  std::atomic_ref(words_->failed).store(0, std::memory_order_release);
  return absl::DeadlineExceededError(
      absl::StrCat("queue ", name_, " waited ", absl::FormatDuration(flag_timeout_),
                   " for the CPU's part of attention, which did not come"));
}

std::byte* StreamQueue::StageArguments(int64_t size_bytes) {
  CHECK(size_bytes <= kMaxArgumentBytes) << size_bytes << " bytes of arguments";
  if (capturing_ && capture_error_.ok()) {
    capture_error_ = absl::InternalError("arguments of one call cannot be kept for another");
  }
  const int64_t rounded = RoundUp(size_bytes, 64);
  if (segment_used_ + rounded > kMaxArgumentBytes) {
    segments_[static_cast<size_t>(segment_)] = Record();
    segment_ = (segment_ + 1) % static_cast<int>(segments_.size());
    segments_[static_cast<size_t>(segment_)].Wait(absl::InfiniteDuration()).IgnoreError();
    segment_used_ = 0;
  }
  std::byte* at = arguments_ + segment_ * kMaxArgumentBytes + segment_used_;
  segment_used_ += rounded;
  return at;
}

}  // namespace writescope::device
