// Pieces of tensor-core kernels: mma.m16n8k16 in bf16 and the way of 4-bit weights into its
// operand. For .cu files only; without sm_80 they end the kernel.
//
// Columns of 32 are dealt to the lanes as in kernels/quantize_int4.h: a lane's 16 bytes of a row
// are words 0 and 1 for the first mma, 2 and 3 for the second, in either operand.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace writescope::kernels {

// c += a * b; a: weights, 16 rows; b: values, 8 slots. Lane 4g + t holds c of rows g (c[0], c[1])
// and g + 8 (c[2], c[3]), slots 2t and 2t + 1.
__device__ inline void Mma(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  __trap();
#endif
}

// Eight quants to an A fragment, exactly. A nibble n under the exponent of 128 is the bf16 number
// 128 + n, and 128 + n - 136 is the quant.
__device__ inline void UnpackInt4(uint32_t word, uint32_t (&a)[4]) {
  constexpr uint32_t k128 = 0x43004300u, k136 = 0x43084308u;
  const __nv_bfloat162 bias = *reinterpret_cast<const __nv_bfloat162*>(&k136);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // (word >> 4i & mask) | k128 in one instruction; the compiler makes two of it.
    uint32_t bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;"
        : "=r"(bits)
        : "r"(word >> (4 * i)), "n"(0x000f000f), "n"(k128));
    const __nv_bfloat162 value = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&bits), bias);
    a[i] = *reinterpret_cast<const uint32_t*>(&value);
  }
}

// The scales of rows g and g + 8 lie in one word.
__device__ inline float LowBf16(uint32_t word) { return __uint_as_float(word << 16); }
__device__ inline float HighBf16(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

// Values [col, col + 8) of a row of `cols`, zeros beyond. `aligned`: rows lie on 16 bytes and cols
// is a multiple of 8.
__device__ inline uint4 LoadValues(const __nv_bfloat16* row, int col, int cols, bool aligned) {
  uint4 bits = make_uint4(0, 0, 0, 0);
  if (row == nullptr || col >= cols) return bits;
  if (aligned) return __ldg(reinterpret_cast<const uint4*>(row + col));
  auto* values = reinterpret_cast<__nv_bfloat16*>(&bits);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (col + i < cols) values[i] = row[col + i];
  }
  return bits;
}

// Weights are read once: they go past the first cache.
__device__ inline uint4 LoadOnce(const void* at) {
  uint4 bits;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(at));
  return bits;
}

}  // namespace writescope::kernels
