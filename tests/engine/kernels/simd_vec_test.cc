// The pieces of simd_vec.h, at the width that every x86-64 has. The wider ones run in the variants.
#define WRITESCOPE_VECTOR_BYTES 16
#include "engine/kernels/simd_vec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "engine/base/bf16.h"

namespace writescope::kernels {
namespace {

TEST(SimdVec, Exp2IsAccurateOverItsRange) {
  double worst = 0;
  for (double x = -126; x <= 0; x += 0.000317) {
    const float argument = static_cast<float>(x);
    const double want = std::exp2(static_cast<double>(argument));
    worst = std::max(worst, std::fabs(Exp2(Vec{} + argument)[0] / want - 1));
  }
  EXPECT_LT(worst, 1.5e-7);
}

TEST(SimdVec, Exp2AtTheEdges) {
  const float infinity = std::numeric_limits<float>::infinity();
  const Vec edges = Exp2(Vec{0.0f, -infinity, -126.001f, -1e30f});
  EXPECT_EQ(edges[0], 1.0f);  // In every bit: a single token must come out as it is.
  EXPECT_EQ(edges[1], 0.0f);
  EXPECT_EQ(edges[2], 0.0f);
  EXPECT_EQ(edges[3], 0.0f);
  EXPECT_TRUE(std::isnan(Exp2(Vec{NAN, 0, 0, 0})[0]));
  for (int n = 0; n <= 126; ++n) {
    EXPECT_EQ(Exp2(Vec{} - static_cast<float>(n))[0], std::exp2(static_cast<float>(-n)));
  }
}

TEST(SimdVec, HalvesOfWords) {
  const uint16_t halves[8] = {FloatToBf16(1),  FloatToBf16(-2), FloatToBf16(3), FloatToBf16(-4),
                              FloatToBf16(.5), FloatToBf16(-6), FloatToBf16(7), FloatToBf16(-8)};
  const WordVec words = LoadWords(reinterpret_cast<const std::byte*>(halves));
  for (int i = 0; i < kLanes; ++i) {
    EXPECT_EQ(LowHalf(words)[i], Bf16ToFloat(halves[2 * i]));
    EXPECT_EQ(HighHalf(words)[i], Bf16ToFloat(halves[2 * i + 1]));
    EXPECT_EQ(LoadBf16(halves + 1)[i], Bf16ToFloat(halves[1 + i]));
  }
}

TEST(SimdVec, TransposeAndReductions) {
  WordVec rows[kLanes];
  for (uint32_t r = 0; r < kLanes; ++r) {
    for (uint32_t c = 0; c < kLanes; ++c) rows[r][c] = 10 * r + c;
  }
  Transpose(rows);
  for (uint32_t r = 0; r < kLanes; ++r) {
    for (uint32_t c = 0; c < kLanes; ++c) EXPECT_EQ(rows[r][c], 10 * c + r);
  }
  for (int largest = 0; largest < kLanes; ++largest) {
    Vec x = {-5, -6, -7, -8};
    x[largest] = -1;
    EXPECT_EQ(MaxOfLanes(x), -1.0f);
  }
  EXPECT_EQ(SumOfLanes(Vec{1, 2, 4, 8}), 15.0f);
}

}  // namespace
}  // namespace writescope::kernels
