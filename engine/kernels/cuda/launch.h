// Launches that begin while the kernel before them ends (programmatic dependent launch, sm_90): it
// hides the time of a launch, and lets a kernel fetch what the one before does not write. For .cu
// files only.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace writescope::kernels {

// Waits until the kernel before has ended and what it wrote is there. A kernel launched by
// LaunchEarly calls it before it touches anything that the one before writes or reads.
__device__ inline void WaitForKernelBefore() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// From here on a kernel launched next by LaunchEarly may begin. Called after WaitForKernelBefore,
// or in a kernel that was not launched early: so all that came before the kernel before is done
// when the next one begins.
__device__ inline void LetNextKernelBegin() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Multiprocessors of this GPU; 0 where that cannot be told.
inline int NumProcessors() {
  static const int count = [] {
    int device = 0, value = 0;
    const bool known =
        cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
    return known ? value : 0;
  }();
  return count;
}

// Of shared memory that a thread block may have; 0 where that cannot be told.
inline int MaxSharedBytes() {
  static const int bytes = [] {
    int device = 0, value = 0;
    const bool known = cudaGetDevice(&device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                              device) == cudaSuccess;
    return known ? value : 0;
  }();
  return bytes;
}

template <typename... Parameters, typename... Args>
cudaError_t LaunchEarly(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, int threads,
                        size_t shared_bytes, Args&&... args) {
  static const bool offered = [] {
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
               cudaSuccess &&
           major >= 9;
  }();
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = offered ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

}  // namespace writescope::kernels
