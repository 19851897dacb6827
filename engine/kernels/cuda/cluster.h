// Thread blocks that run side by side and see each other's shared memory (sm_90); built for an
// older GPU nothing of it does anything. For .cu files only.
#pragma once

#include <cooperative_groups.h>

namespace writescope::kernels {

// What the first thread block of a cluster has at the same place.
template <typename T>
__device__ T* InFirstOfCluster(T* shared) {
#if __CUDA_ARCH__ >= 900
  return cooperative_groups::this_cluster().map_shared_rank(shared, 0);
#else
  return shared;
#endif
}

// All threads of a cluster arrive, and those that wait then see what was written before.
__device__ inline void ArriveAtCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void WaitForCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

}  // namespace writescope::kernels
