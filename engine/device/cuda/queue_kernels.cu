#include "engine/device/cuda/queue_kernels.h"

namespace writescope::device {
namespace {

__device__ uint64_t GlobalNs() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

// Orders what the CPU wrote before the flag before what later kernels read.
__device__ uint64_t LoadAcquireSystem(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

__global__ void WaitFlagKernel(const uint64_t* flag, uint64_t value, uint64_t timeout_ns,
                               uint32_t* failed, uint32_t* failed_host) {
  if (*failed != 0) return;
  const uint64_t start_ns = GlobalNs();
  while (LoadAcquireSystem(flag) < value) {
    if (GlobalNs() - start_ns > timeout_ns) {
      *failed = 1;
      *failed_host = 1;
      __threadfence_system();
      return;
    }
  }
}

}  // namespace

cudaError_t LaunchWaitFlag(cudaStream_t stream, const uint64_t* flag, uint64_t value,
                           uint64_t timeout_ns, uint32_t* failed, uint32_t* failed_host) {
  WaitFlagKernel<<<1, 1, 0, stream>>>(flag, value, timeout_ns, failed, failed_host);
  return cudaGetLastError();
}

}  // namespace writescope::device
