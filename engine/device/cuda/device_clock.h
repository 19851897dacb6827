// Times of CUDA events, and of the device's own timer, on the host's steady clock.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>

#include "engine/device/cuda/queue_kernels.h"

namespace writescope::device {

// Thread-safe. A time is that of a base plus what the device measured since; the base is renewed
// now and then, since the two clocks drift and the difference of events is a float. Of a base the
// host knows two moments between which it was: first that of a word that the device waits for, in
// microseconds of which it has stamped its timer.
class DeviceClock {
 public:
  DeviceClock() = default;
  ~DeviceClock();
  // Creates the base.
  cudaError_t Init();
  // Seconds as NowSeconds() of an event that is done; 0 when the device cannot say.
  double HostSeconds(cudaEvent_t event);
  // The same of %globaltimer.
  double HostSecondsOfStamp(uint64_t stamp_ns);

 private:
  // All with mutex_ held.
  void RenewInTime();
  // Both give the device `begin_s` to begin; NOT_READY where it did not.
  cudaError_t Renew(double begin_s);
  cudaError_t TryOnce(double begin_s, double* error_s);

  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;  // Always idle, so that what it gets is done at once
  cudaEvent_t base_ = nullptr;
  cudaEvent_t spare_ = nullptr;
  ClockWords* words_ = nullptr;
  uint64_t turn_ = 0;
  double renew_at_s_ = 0;
  double event_base_s_ = 0;
  double stamp_base_s_ = 0;
  uint64_t stamp_base_ns_ = 0;
};

}  // namespace writescope::device
