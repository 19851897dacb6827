#include "engine/device/cuda/device_clock.h"

#include <utility>

#include "engine/device/device.h"

namespace writescope::device {
namespace {

constexpr double kRenewAfterSeconds = 1;
// Of so many tries the shortest counts: half its length is the error.
constexpr int kTries = 8;

}  // namespace

DeviceClock::~DeviceClock() {
  for (cudaEvent_t event : {base_, spare_}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

cudaError_t DeviceClock::Init() {
  std::lock_guard lock(mutex_);
  if (cudaError_t e = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); e) return e;
  for (cudaEvent_t* event : {&base_, &spare_}) {
    if (cudaError_t e = cudaEventCreate(event); e) return e;
  }
  return Renew();
}

cudaError_t DeviceClock::Renew() {
  double shortest_s = 1e9;
  for (int i = 0; i < kTries; ++i) {
    const double before_s = NowSeconds();
    if (cudaError_t e = cudaEventRecord(spare_, stream_); e) return e;
    if (cudaError_t e = cudaEventSynchronize(spare_); e) return e;
    const double after_s = NowSeconds();
    if (after_s - before_s >= shortest_s) continue;
    shortest_s = after_s - before_s;
    base_s_ = (before_s + after_s) / 2;
    std::swap(base_, spare_);
  }
  return cudaSuccess;
}

double DeviceClock::HostSeconds(cudaEvent_t event) {
  std::lock_guard lock(mutex_);
  if (NowSeconds() - base_s_ > kRenewAfterSeconds && Renew() != cudaSuccess) return 0;
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, base_, event) != cudaSuccess) return 0;
  return base_s_ + 1e-3 * static_cast<double>(milliseconds);
}

}  // namespace writescope::device
