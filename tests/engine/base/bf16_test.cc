#include "engine/base/bf16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace writescope {
namespace {

TEST(Bf16, EveryValueComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = Bf16ToFloat(static_cast<uint16_t>(bits));
    const uint16_t back = FloatToBf16(value);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(Bf16ToFloat(back))) << bits;
    } else {
      EXPECT_EQ(back, bits);
    }
  }
}

TEST(Bf16, RoundsToNearestTiesToEven) {
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f800000u)), 0x3f80);  // 1
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f807fffu)), 0x3f80);  // Just below the middle
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f808000u)), 0x3f80);  // Tie: stays even
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f818000u)), 0x3f82);  // Tie: goes up to even
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f808001u)), 0x3f81);  // Just above
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0xbf808001u)), 0xbf81);  // The same below zero
}

// The nearest of the two neighbours, by exhaustive comparison in double.
TEST(Bf16, IsNearestForAllMantissas) {
  for (uint32_t low = 0; low < 0x20000; low += 7) {
    const float value = std::bit_cast<float>(0x40400000u + low);
    const double got = Bf16ToFloat(FloatToBf16(value));
    const double below = Bf16ToFloat(static_cast<uint16_t>((0x40400000u + low) >> 16));
    const double above = Bf16ToFloat(static_cast<uint16_t>(((0x40400000u + low) >> 16) + 1));
    EXPECT_EQ(std::fabs(got - value), std::fmin(value - below, above - value)) << value;
  }
}

TEST(Bf16, InfinitiesAndNaN) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(Bf16ToFloat(FloatToBf16(kInf)), kInf);
  EXPECT_EQ(Bf16ToFloat(FloatToBf16(-kInf)), -kInf);
  EXPECT_EQ(Bf16ToFloat(FloatToBf16(std::numeric_limits<float>::max())), kInf);
  // A NaN whose payload is in the lower half only must not become an infinity.
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::bit_cast<float>(0xffffffffu)))));
}

}  // namespace
}  // namespace writescope
