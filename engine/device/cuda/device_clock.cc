#include "engine/device/cuda/device_clock.h"

#include <algorithm>
#include <new>
#include <utility>

#include "engine/device/device.h"

namespace writescope::device {
namespace {

constexpr double kRenewAfterSeconds = 1;
// Of so many tries the closest counts.
constexpr int kTries = 4;
// Under tools that run one thing at a time the kernel ends before the host can answer it.
constexpr uint64_t kAnswerNs = 100'000;
// A device that is full of other kernels may begin late. The base that there is will do until then.
constexpr double kBeginSeconds = 500e-6;
constexpr double kFirstBeginSeconds = 5;

// Whether the device has written `turn` before `until_s`.
bool Await(const uint64_t* word, uint64_t turn, double until_s) {
  while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != turn) {
    if (NowSeconds() > until_s) return false;
    __builtin_ia32_pause();
  }
  return true;
}

}  // namespace

DeviceClock::~DeviceClock() {
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  for (cudaEvent_t event : {base_, spare_}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
  if (words_ != nullptr) cudaFreeHost(words_);
  if (ended_ns_ != nullptr) cudaFree(ended_ns_);
}

cudaError_t DeviceClock::Init() {
  std::lock_guard lock(mutex_);
  int least = 0, greatest = 0;
  if (cudaError_t e = cudaDeviceGetStreamPriorityRange(&least, &greatest); e) return e;
  if (cudaError_t e = cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest); e) {
    return e;
  }
  for (cudaEvent_t* event : {&base_, &spare_}) {
    if (cudaError_t e = cudaEventCreate(event); e) return e;
  }
  void* words = nullptr;
  if (cudaError_t e = cudaHostAlloc(&words, sizeof(ClockWords), cudaHostAllocMapped); e) return e;
  words_ = new (words) ClockWords();
  void* ended_ns = nullptr;
  if (cudaError_t e = cudaMalloc(&ended_ns, sizeof(uint64_t)); e) return e;
  ended_ns_ = static_cast<uint64_t*>(ended_ns);
  // The first launch loads a kernel, which takes longer than the device may take to begin.
  if (cudaError_t e = LaunchClockStamp(stream_, words_, ++turn_, 0, ended_ns_); e) return e;
  if (cudaError_t e = LaunchClockFollow(stream_, words_, turn_, ended_ns_); e) return e;
  if (cudaError_t e = cudaStreamSynchronize(stream_); e) return e;
  renew_at_s_ = NowSeconds() + kRenewAfterSeconds;
  return Renew(kFirstBeginSeconds);
}

cudaError_t DeviceClock::TryOnce(double begin_s, double* error_s) {
  const uint64_t turn = ++turn_;
  double after_s = NowSeconds();  // The stamp comes after this
  if (cudaError_t e = LaunchClockStamp(stream_, words_, turn, kAnswerNs, ended_ns_); e) return e;
  if (cudaError_t e = cudaEventRecord(spare_, stream_); e) return e;
  if (cudaError_t e = LaunchClockFollow(stream_, words_, turn, ended_ns_); e) return e;
  if (!Await(&words_->ready, turn, NowSeconds() + begin_s)) return cudaErrorNotReady;
  const double ready_s = NowSeconds();
  // A kernel that is done has not waited for `go`; then only that it was launched is known.
  if (__atomic_load_n(&words_->done, __ATOMIC_ACQUIRE) != turn) after_s = ready_s;
  __atomic_store_n(&words_->go, turn, __ATOMIC_RELEASE);
  if (!Await(&words_->done, turn, NowSeconds() + begin_s)) return cudaErrorNotReady;
  const double stamped_s = NowSeconds();
  if (!Await(&words_->followed, turn, NowSeconds() + begin_s)) return cudaErrorNotReady;
  MoveBase();
  if (stamped_s - after_s >= *error_s) return cudaSuccess;
  *error_s = stamped_s - after_s;
  stamp_base_s_ = (after_s + stamped_s) / 2;
  stamp_base_ns_ = words_->stamp_ns;
  return cudaSuccess;
}

// To the event that has just passed: where the base says that it was, but between the two kernels.
// So a try in which the second began late spoils nothing, and all tries together know the most.
void DeviceClock::MoveBase() {
  const uint64_t ended_ns = words_->ended_ns;
  const uint64_t begun_ns = std::max(words_->begun_ns, ended_ns);
  uint64_t at_ns = ended_ns + (begun_ns - ended_ns) / 2;
  float milliseconds = 0;
  if (event_base_ns_ != 0 && cudaEventElapsedTime(&milliseconds, base_, spare_) == cudaSuccess) {
    const double elapsed_ns = 1e6 * static_cast<double>(milliseconds);
    at_ns = std::clamp(event_base_ns_ + static_cast<uint64_t>(elapsed_ns), ended_ns, begun_ns);
  }
  event_base_ns_ = at_ns;
  std::swap(base_, spare_);
}

cudaError_t DeviceClock::Renew(double begin_s) {
  double error_s = 1e9;
  cudaError_t last = cudaSuccess;
  for (int i = 0; i < kTries; ++i) {
    last = TryOnce(begin_s, &error_s);
    if (last != cudaSuccess) break;
  }
  return error_s < 1e9 ? cudaSuccess : last;
}

void DeviceClock::RenewInTime() {
  if (NowSeconds() < renew_at_s_) return;
  Renew(kBeginSeconds);
  renew_at_s_ = NowSeconds() + kRenewAfterSeconds;
}

double DeviceClock::SecondsOf(uint64_t stamp_ns) const {
  return stamp_base_s_ +
         1e-9 * static_cast<double>(static_cast<int64_t>(stamp_ns - stamp_base_ns_));
}

double DeviceClock::HostSeconds(cudaEvent_t event) {
  std::lock_guard lock(mutex_);
  RenewInTime();
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, base_, event) != cudaSuccess) return 0;
  return SecondsOf(event_base_ns_) + 1e-3 * static_cast<double>(milliseconds);
}

double DeviceClock::HostSecondsOfStamp(uint64_t stamp_ns) {
  std::lock_guard lock(mutex_);
  RenewInTime();
  return SecondsOf(stamp_ns);
}

}  // namespace writescope::device
