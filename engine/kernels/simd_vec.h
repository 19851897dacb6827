// Vectors for the kernel files that are built once for each instruction set. Only a .cc that
// defines WRITESCOPE_VECTOR_BYTES (16, 32 or 64) includes this header, and everything in it is in
// that file's anonymous namespace: an inline function that two files share would be emitted by
// both, and the linker might keep the copy that was built for the newer processor. For the same
// reason the headers of the standard library are used here for their types only, never for their
// functions.
#pragma once

#ifndef WRITESCOPE_VECTOR_BYTES
#error "define WRITESCOPE_VECTOR_BYTES as the width of a register before including simd_vec.h"
#endif

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <utility>

namespace writescope::kernels {
namespace {

constexpr int kVectorBytes = WRITESCOPE_VECTOR_BYTES;
constexpr int kLanes = kVectorBytes / 4;

typedef float Vec __attribute__((vector_size(kVectorBytes)));
typedef int32_t IntVec __attribute__((vector_size(kVectorBytes)));
typedef uint32_t WordVec __attribute__((vector_size(kVectorBytes)));
typedef uint16_t HalfVec __attribute__((vector_size(kVectorBytes / 2)));
// As they lie in memory: aligned like their elements.
typedef float VecInMemory __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef uint32_t WordVecInMemory __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef uint16_t HalfVecInMemory
    __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));

using LaneIndices = std::make_integer_sequence<int, kLanes>;

#define WRITESCOPE_INLINE inline __attribute__((always_inline))

WRITESCOPE_INLINE Vec Load(const float* from) {
  return *reinterpret_cast<const VecInMemory*>(from);
}
WRITESCOPE_INLINE void Store(float* to, Vec value) { *reinterpret_cast<VecInMemory*>(to) = value; }
WRITESCOPE_INLINE WordVec LoadWords(const std::byte* from) {
  return *reinterpret_cast<const WordVecInMemory*>(from);
}
WRITESCOPE_INLINE void StoreWords(std::byte* to, WordVec words) {
  *reinterpret_cast<WordVecInMemory*>(to) = words;
}

// The low and the high bf16 value of each word. A bf16 is the upper half of a float.
WRITESCOPE_INLINE Vec LowHalf(WordVec words) { return reinterpret_cast<Vec>(words << 16); }
WRITESCOPE_INLINE Vec HighHalf(WordVec words) { return reinterpret_cast<Vec>(words & 0xffff0000u); }
// kLanes neighbouring bf16 values, in order.
WRITESCOPE_INLINE Vec LoadBf16(const uint16_t* from) {
  const HalfVec halves = *reinterpret_cast<const HalfVecInMemory*>(from);
  return reinterpret_cast<Vec>(__builtin_convertvector(halves, WordVec) << 16);
}

// kLanes values as bf16, rounded to nearest, ties to even; NaN stays NaN.
WRITESCOPE_INLINE HalfVec ToBf16(Vec value) {
#ifdef __AVX512BF16__
  return reinterpret_cast<HalfVec>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(value)));
#else
  const WordVec bits = reinterpret_cast<WordVec>(value);
  const WordVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const WordVec quiet = (bits >> 16) | 0x40u;
  return __builtin_convertvector(value == value ? rounded : quiet, HalfVec);
#endif
}
WRITESCOPE_INLINE void StoreBf16(std::byte* to, Vec value) {
  *reinterpret_cast<HalfVecInMemory*>(to) = ToBf16(value);
}
// In the low half of each word; the high one is zero.
WRITESCOPE_INLINE WordVec WidenedBf16(Vec value) {
  return __builtin_convertvector(ToBf16(value), WordVec);
}

template <int... i>
WRITESCOPE_INLINE constexpr IntVec LaneNumbers(std::integer_sequence<int, i...>) {
  return IntVec{i...};
}

// Lane i of the result is lane i ^ step.
template <int step, int... i>
WRITESCOPE_INLINE Vec SwapLanes(Vec x, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(x, x, (i ^ step)...);
}
template <int step = kLanes / 2>
WRITESCOPE_INLINE float MaxOfLanes(Vec x) {
  const Vec other = SwapLanes<step>(x, LaneIndices());
  const Vec larger = other > x ? other : x;
  if constexpr (step == 1) {
    return larger[0];
  } else {
    return MaxOfLanes<step / 2>(larger);
  }
}
template <int step = kLanes / 2>
WRITESCOPE_INLINE float SumOfLanes(Vec x) {
  const Vec sum = x + SwapLanes<step>(x, LaneIndices());
  if constexpr (step == 1) {
    return sum[0];
  } else {
    return SumOfLanes<step / 2>(sum);
  }
}

// Whether any lane of a comparison is true.
WRITESCOPE_INLINE bool AnyLane(IntVec is_true) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(is_true),
                                reinterpret_cast<__m512i>(is_true)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8(reinterpret_cast<__m256i>(is_true)) != 0;
#else
  typedef int64_t Halves __attribute__((vector_size(16)));
  const auto halves = reinterpret_cast<Halves>(is_true);
  return (halves[0] | halves[1]) != 0;
#endif
}

// 2^x for x <= 0; 0 below -126, so that -inf gives 0; NaN stays NaN. Relative error under 1.5e-7.
// 2^x = 2^n * 2^f with n the nearest integer. The polynomial is 1 + f * g(f), g of degree 5 through
// (2^f - 1) / f at the Chebyshev nodes of [-0.5, 0.5] (9e-9 off), so that 2^0 is 1 in every bit.
WRITESCOPE_INLINE Vec Exp2(Vec x) {
  constexpr float kLowest = -126.0f;
#ifdef __AVX512F__
  // With an instruction for each of rounding, scaling and leaving out what is too low.
  const auto argument = reinterpret_cast<__m512>(x);
  const __mmask16 counts = _mm512_cmp_ps_mask(argument, _mm512_set1_ps(kLowest), _CMP_NLT_UQ);
  const __m512 whole = _mm512_maskz_roundscale_ps(counts, argument, _MM_FROUND_TO_NEAREST_INT);
  const Vec f = x - reinterpret_cast<Vec>(whole);
#else
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bits below one.
  const Vec clamped = x < kLowest ? Vec{} + kLowest : x;  // Written so that NaN passes.
  const Vec rounded = clamped + kRound;
  const IntVec exponent = reinterpret_cast<IntVec>(rounded) - 0x4b400000;  // The bits of kRound.
  const Vec f = clamped - (rounded - kRound);
#endif
  Vec g = f * 0.00015453163359779865f + 0.0013390863314270973f;
  g = g * f + 0.009618083015084267f;
  g = g * f + 0.055503569543361664f;
  g = g * f + 0.24022650718688965f;
  g = g * f + 0.6931471824645996f;
#ifdef __AVX512F__
  return reinterpret_cast<Vec>(
      _mm512_maskz_scalef_ps(counts, reinterpret_cast<__m512>(g * f + 1.0f), whole));
#else
  const Vec power = reinterpret_cast<Vec>((exponent + 127) << 23);
  const Vec result = (g * f + 1.0f) * power;
  return x < kLowest ? Vec{} : result;
#endif
}

// One stage of the transpose below: exchanges bit `step` of the row number with that of the lane.
template <int step, int... i>
WRITESCOPE_INLINE void ExchangeBit(WordVec& low, WordVec& high, std::integer_sequence<int, i...>) {
  const WordVec new_low =
      __builtin_shufflevector(low, high, ((i & step) ? kLanes + (i ^ step) : i)...);
  high = __builtin_shufflevector(low, high, ((i & step) ? kLanes + i : (i | step))...);
  low = new_low;
}
template <int step = kLanes / 2>
WRITESCOPE_INLINE void Transpose(WordVec (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (!(i & step)) ExchangeBit<step>(rows[i], rows[i | step], LaneIndices());
  }
  if constexpr (step > 1) Transpose<step / 2>(rows);
}

}  // namespace
}  // namespace writescope::kernels
