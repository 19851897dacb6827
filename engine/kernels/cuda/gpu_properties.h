// What launchers ask of the GPU that is in use, once.
#pragma once

#include <cuda_runtime_api.h>

namespace writescope::kernels {

// Of its compute capability; 0 where that cannot be told.
inline int ComputeMajor() {
  static const int major = [] {
    int device = 0, value = 0;
    const bool known =
        cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess;
    return known ? value : 0;
  }();
  return major;
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

}  // namespace writescope::kernels
