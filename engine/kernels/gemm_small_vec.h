// Vector dot products for few rows of x, one source for every instruction set. Included by
// gemm_small_{generic,avx2,avx512}.cc only; see simd_vec.h.
//
// Each output is one running vector sum over the columns, then the sum of its lanes, then the
// columns that fill no vector: the same order whatever else is computed beside it, so the result of
// a row does not depend on the other rows of the batch.
#pragma once

#include "engine/kernels/gemm_small_flat.h"
#include "engine/kernels/simd_vec.h"

namespace writescope::kernels {
namespace {

constexpr int kDotRows = 4;                              // Rows of x in registers
constexpr int kDotWeights = kVectorBytes == 64 ? 4 : 2;  // Rows of W in registers

WRITESCOPE_INLINE Vec LoadWeights(const float* from) { return Load(from); }
WRITESCOPE_INLINE Vec LoadWeights(const uint16_t* from) { return LoadBf16(from); }
WRITESCOPE_INLINE float WeightAt(const float* from) { return *from; }
WRITESCOPE_INLINE float WeightAt(const uint16_t* from) {
  const uint32_t bits = uint32_t{*from} << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

template <typename Weight, int kRows, int kWeights>
inline void Dots(const GemmArgs& args, int64_t row, int64_t n) {
  const float* x[kRows];
  const Weight* w[kWeights];
  Vec sum[kRows][kWeights];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) x[r] = args.x + (row + r) * args.x_stride;
#pragma GCC unroll 4
  for (int j = 0; j < kWeights; ++j) {
    w[j] = reinterpret_cast<const Weight*>(args.w) + (n + j) * args.k;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[r][j] = Vec{};
  }
  const int64_t whole = args.k / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    Vec x_value[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) x_value[r] = Load(x[r] + i);
#pragma GCC unroll 4
    for (int j = 0; j < kWeights; ++j) {
      const Vec w_value = LoadWeights(w[j] + i);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r][j] += x_value[r] * w_value;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* y = args.y + (row + r) * args.y_stride + n;
    for (int j = 0; j < kWeights; ++j) {
      float dot = SumOfLanes(sum[r][j]);
      for (int64_t i = whole; i < args.k; ++i) dot += x[r][i] * WeightAt(w[j] + i);
      y[j] = args.accumulate ? y[j] + dot : dot;
    }
  }
}

template <typename Weight, int kWeights>
inline void DotsOfRows(const GemmArgs& args, int64_t n) {
  int64_t row = 0;
  for (; row + kDotRows <= args.num_rows; row += kDotRows) {
    Dots<Weight, kDotRows, kWeights>(args, row, n);
  }
  if (row + 2 <= args.num_rows) {
    Dots<Weight, 2, kWeights>(args, row, n);
    row += 2;
  }
  if (row < args.num_rows) Dots<Weight, 1, kWeights>(args, row, n);
}

template <typename Weight>
inline void AllDots(const GemmArgs& args) {
  int64_t n = 0;
  for (; n + kDotWeights <= args.n; n += kDotWeights) DotsOfRows<Weight, kDotWeights>(args, n);
  for (; n < args.n; ++n) DotsOfRows<Weight, 1>(args, n);
}

inline void SmallGemmVec(const GemmArgs& args) {
  if (args.type == GemmWeights::kBf16) {
    AllDots<uint16_t>(args);
  } else {
    AllDots<float>(args);
  }
}

}  // namespace
}  // namespace writescope::kernels
