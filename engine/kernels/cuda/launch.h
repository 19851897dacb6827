// Launches that begin while the kernel before them ends (programmatic dependent launch, sm_90): it
// hides the time of a launch, and lets a kernel fetch what the one before does not write. For .cu
// files only.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "engine/kernels/cuda/gpu_properties.h"

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
// when the next one begins. What lies between two products of a layer (the preparation of queries,
// attention and its end, the sum of experts) calls it first: of the kernels that follow these, none
// fetches early what a kernel since the product before has written, but weights, and what the step
// brought with it. So a product's weights come while attention is still at work.
__device__ inline void LetNextKernelBegin() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Whether the GPU has what came with sm_90, bulk copies and clusters, and the file that asks is
// built for it.
inline bool HasSm90() {
  constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};
  return *std::max_element(std::begin(kArchitectures), std::end(kArchitectures)) >= 900 &&
         ComputeMajor() >= 9;
}

// `cluster` thread blocks at a time run side by side and see each other's shared memory; more than
// one needs sm_90.
template <typename... Parameters, typename... Args>
cudaError_t LaunchEarlyInClusters(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid,
                                  int cluster, int threads, size_t shared_bytes, Args&&... args) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = ComputeMajor() < 9 ? 0 : cluster == 1 ? 1 : 2;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

template <typename... Parameters, typename... Args>
cudaError_t LaunchEarly(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, int threads,
                        size_t shared_bytes, Args&&... args) {
  return LaunchEarlyInClusters(stream, kernel, grid, 1, threads, shared_bytes,
                               std::forward<Args>(args)...);
}

}  // namespace writescope::kernels
