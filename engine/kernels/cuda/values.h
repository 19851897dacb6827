// How the GPU's kernels read and write activations, float32 or bf16. For .cu files only.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

namespace writescope::kernels {

__device__ inline float ToFloat(float value) { return value; }
__device__ inline float ToFloat(__nv_bfloat16 value) { return __bfloat162float(value); }

// Rounds to nearest, ties to even.
template <typename T>
__device__ inline T FromFloat(float value);
template <>
__device__ inline float FromFloat<float>(float value) {
  return value;
}
template <>
__device__ inline __nv_bfloat16 FromFloat<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Eight neighbouring values, aligned to 16 bytes.
__device__ inline void Load8(const float* from, float (&to)[8]) {
  *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
  *reinterpret_cast<float4*>(to + 4) = *reinterpret_cast<const float4*>(from + 4);
}
__device__ inline void Load8(const __nv_bfloat16* from, float (&to)[8]) {
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = __uint_as_float(words[i] << 16);
    to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ inline void Store8(const float (&from)[8], float* to) {
  *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
  *reinterpret_cast<float4*>(to + 4) = *reinterpret_cast<const float4*>(from + 4);
}
__device__ inline void Store8(const float (&from)[8], __nv_bfloat16* to) {
  __nv_bfloat162 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(pairs);
}

// Sums over a warp in a fixed order; every lane gets the sum.
__device__ inline float WarpSum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

// The same over a thread block; every thread gets the sum. Nobody else uses `warp_sums`, which is
// shared memory, and all threads come here.
template <int kWarps>
__device__ inline float BlockSum(float value, float (&warp_sums)[kWarps]) {
  value = WarpSum(value);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) value += warp_sums[i];
  return value;
}

__device__ inline float SiLu(float value) { return value / (1.0f + expf(-value)); }

inline bool IsAligned16(const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }

}  // namespace writescope::kernels
