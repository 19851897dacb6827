// Times of CUDA events, and of the device's own timer, on the host's steady clock.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>

#include "engine/device/cuda/queue_kernels.h"

namespace writescope::device {

// Thread-safe. The host knows two moments between which the device stamped its timer: first that of
// a word that the device waits for. Events are found on the device's timer, since the host learns
// late of an event that has passed: the base event lies between two kernels that stamp it, too.
// Both are renewed now and then, since clocks drift and the difference of events is a float.
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
  void MoveBase();
  double SecondsOf(uint64_t stamp_ns) const;

  std::mutex mutex_;
  // Always idle, so that what it gets is done at once, and before what other streams have pending.
  cudaStream_t stream_ = nullptr;
  cudaEvent_t base_ = nullptr;
  cudaEvent_t spare_ = nullptr;
  ClockWords* words_ = nullptr;
  uint64_t* ended_ns_ = nullptr;  // Device
  uint64_t turn_ = 0;
  double renew_at_s_ = 0;
  double stamp_base_s_ = 0;
  uint64_t stamp_base_ns_ = 0;
  uint64_t event_base_ns_ = 0;  // 0: there is none yet
};

}  // namespace writescope::device
