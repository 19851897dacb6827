// Times of CUDA events on the host's steady clock.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

namespace writescope::device {

// Thread-safe. An event's time is that of a base event plus what the device measured between; the
// base is renewed now and then, since the two clocks drift and the difference is a float.
class DeviceClock {
 public:
  DeviceClock() = default;
  ~DeviceClock();
  // Creates the base.
  cudaError_t Init();
  // Seconds as NowSeconds() of an event that is done; 0 when the device cannot say.
  double HostSeconds(cudaEvent_t event);

 private:
  cudaError_t Renew();  // With mutex_ held

  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;  // Always idle, so that its events are done at once
  cudaEvent_t base_ = nullptr;
  cudaEvent_t spare_ = nullptr;
  double base_s_ = 0;
};

}  // namespace writescope::device
