// Copies into shared memory that go on by themselves: of 16 bytes (sm_80), or of any size in bulk,
// with barriers that tell when they are there (sm_90). For .cu files only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace writescope::kernels {

__device__ inline uint32_t SharedAddress(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

__device__ inline void InitBarrier(uint64_t* barrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals));
#else
  __trap();
#endif
}

// Between the first use of barriers and their init: the copy engine sees them, too.
__device__ inline void PublishBarriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ inline void Arrive(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
#endif
}

// Arrives, and has the barrier wait for so many bytes as well.
__device__ inline void ArriveExpecting(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

// Waits for the end of the barrier's phase of that parity.
__device__ inline void WaitBarrier(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
#endif
}

// 16-byte places, and a multiple of 16 bytes.
__device__ inline void CopyBulk(void* to_shared, const void* from, int bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(to_shared)),
      "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
#else
  __trap();
#endif
}

// How the second cache is to keep what is copied: what is read once makes room before all else, so
// that code, norms and the rows of a step stay while weights pass through.
__device__ inline uint64_t ReadOncePolicy() {
  uint64_t policy = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}
__device__ inline uint64_t KeepPolicy() {
  uint64_t policy = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}
__device__ inline void CopyBulk(void* to_shared, const void* from, int bytes, uint64_t* barrier,
                                uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(SharedAddress(to_shared)),
      "l"(from), "r"(bytes), "r"(SharedAddress(barrier)), "l"(policy)
      : "memory");
#else
  __trap();
#endif
}

// Bulk copies and products of warpgroups take a way of their own to shared memory. Between what
// this thread has written, copies that have landed included, and a product that reads it; and
// between what it has read and a bulk copy over it. Before the Arrive that tells of either.
__device__ inline void FenceAsyncProxy() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ inline void CopyAsync16(uint32_t to_shared, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to_shared), "l"(from));
#endif
}
// Zeros where it is not `inside`.
__device__ inline void CopyAsync16(uint32_t to_shared, const void* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from),
               "r"(inside ? 16 : 0));
#endif
}
__device__ inline void CommitCopies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}
template <int kPending>
__device__ inline void WaitCopies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace writescope::kernels
