#include "engine/device/cuda/queue_kernels.h"

namespace writescope::device {
namespace {

// A look at host memory takes as long as what the link has on its way already: some microseconds
// beside copies. Looks that follow each other would see a flag half such a time late on average; of
// these, each begins a little after the one before.
constexpr int kPollers = 8;
constexpr uint64_t kStaggerNs = 1300;

__device__ uint64_t GlobalNs() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

// Orders what the CPU wrote before the flag before what is read from here on.
__device__ uint64_t LoadAcquireSystem(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

__device__ void StoreReleaseSystem(uint64_t* at, uint64_t value) {
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// What the kernels before have written is there from here on.
__device__ void WaitForKernelBefore() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// The first thread of each warp looks, but for that of the last one, which tells when all before is
// done.
__global__ void WaitFlagKernel(const __grid_constant__ FlagWait wait) {
  __shared__ int ended;
  if (threadIdx.x == 0) ended = 0;
  __syncthreads();
  if (threadIdx.x % 32 != 0) return;
  if (threadIdx.x / 32 == kPollers) {
    WaitForKernelBefore();
    if (wait.began_ns != nullptr) StoreReleaseSystem(wait.began_ns, GlobalNs());
    return;
  }
  const uint64_t start_ns = GlobalNs();
  const uint64_t first_look_ns = start_ns + threadIdx.x / 32 * kStaggerNs;
  bool has_failed = *wait.failed != 0;
  bool is_late = false;
  while (!has_failed && !is_late && atomicAdd(&ended, 0) == 0) {
    if (GlobalNs() < first_look_ns) continue;
    if (LoadAcquireSystem(wait.flag) >= wait.value) break;
    is_late = GlobalNs() - start_ns > wait.timeout_ns;
  }
  // One speaks for all: the others have nothing to add.
  if (atomicExch(&ended, 1) != 0) return;
  WaitForKernelBefore();
  if (is_late) {
    *wait.failed = 1;
    *wait.failed_host = 1;
    __threadfence_system();
  }
  if (wait.seen_ns != nullptr) StoreReleaseSystem(wait.seen_ns, GlobalNs());
#if __CUDA_ARCH__ >= 900
  if (!is_late && !has_failed) cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__global__ void ClockStampKernel(ClockWords* words, uint64_t turn, uint64_t timeout_ns,
                                 uint64_t* ended_ns) {
  StoreReleaseSystem(&words->ready, turn);
  const uint64_t start_ns = GlobalNs();
  while (LoadAcquireSystem(&words->go) != turn && GlobalNs() - start_ns <= timeout_ns) {
  }
  words->stamp_ns = GlobalNs();
  StoreReleaseSystem(&words->done, turn);
  *ended_ns = GlobalNs();
}

__global__ void ClockFollowKernel(ClockWords* words, uint64_t turn, const uint64_t* ended_ns) {
  words->begun_ns = GlobalNs();
  words->ended_ns = *ended_ns;
  StoreReleaseSystem(&words->followed, turn);
}

}  // namespace

cudaError_t LaunchWaitFlag(cudaStream_t stream, const FlagWait& wait) {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32 * (kPollers + 1));
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, WaitFlagKernel, wait);
}

cudaError_t LaunchClockStamp(cudaStream_t stream, ClockWords* words, uint64_t turn,
                             uint64_t timeout_ns, uint64_t* ended_ns) {
  ClockStampKernel<<<1, 1, 0, stream>>>(words, turn, timeout_ns, ended_ns);
  return cudaGetLastError();
}

cudaError_t LaunchClockFollow(cudaStream_t stream, ClockWords* words, uint64_t turn,
                              const uint64_t* ended_ns) {
  ClockFollowKernel<<<1, 1, 0, stream>>>(words, turn, ended_ns);
  return cudaGetLastError();
}

}  // namespace writescope::device
