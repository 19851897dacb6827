// Instructions of sm_80 and later that the attention kernels use. Included by .cu files only. Built
// for an older GPU they trap: the host does not choose these kernels there.
#pragma once

#include <cstdint>

#include "engine/kernels/cuda/async_copy.h"
#include "engine/kernels/cuda/attend_maps.h"

namespace writescope::kernels {

// 16 bytes in registers.
struct alignas(16) Words4 {
  uint32_t w[4];
};

// c += A B of bf16.
__device__ inline void Mma(float (&c)[4], const Words4& a, uint32_t b0, uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  __trap();
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.w[0]), "r"(a.w[1]), "r"(a.w[2]), "r"(a.w[3]), "r"(b0), "r"(b1));
#endif
}

// Two floats as bf16, `low` in the low half.
__device__ inline uint32_t PackBf16(float low, float high) {
  uint32_t word = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  __trap();
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
  return word;
}

// 2^x; 0 for -inf and where it would be denormal.
__device__ inline float FastExp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Keys and values are read once and by one thread block: they need no place in L1.
__device__ inline Words4 LoadStreamed(const std::byte* at) {
  Words4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(at));
  return v;
}

__device__ inline Words4 LoadShared(uint32_t at) {
  Words4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "r"(at));
  return v;
}

__device__ inline uint32_t PermuteBytes(uint32_t a, uint32_t b, unsigned selector) {
  return __byte_perm(a, b, selector);
}

// Of the four lanes that share rows of the accumulators.
__device__ inline float MaxOfQuad(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}
__device__ inline float SumOfQuad(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// A fragment of queries: step `step` of rows low_row (g) and high_row (g + 8); null is zeros.
__device__ inline Words4 LoadQueryFragment(const float* low_row, const float* high_row, int lane,
                                           int step) {
  Words4 a;
  const float* rows[2] = {low_row, high_row};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* row = rows[i & 1];
    float2 pair = make_float2(0, 0);
    if (row != nullptr) {
      pair =
          *reinterpret_cast<const float2*>(row + kStepDims * step + 2 * LaneT(lane) + 8 * (i >> 1));
    }
    a.w[i] = PackBf16(pair.x, pair.y);
  }
  return a;
}

// Weights of tile `tile` of a unit, from its four products' scores.
__device__ inline Words4 PackWeights(const float (*scores)[4], int tile) {
  Words4 a;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = WeightProduct(i);
    const int c = WeightAccumulator(tile, i);
    a.w[i] = PackBf16(scores[n][c], scores[n + 1][c]);
  }
  return a;
}

}  // namespace writescope::kernels
