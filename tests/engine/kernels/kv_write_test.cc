#include "engine/kernels/kv_write.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "engine/base/bf16.h"
#include "tests/support/seed.h"

namespace writescope::kernels {
namespace {

float Read(const std::vector<std::byte>& plane, int64_t index, KvDtype dtype) {
  if (dtype == KvDtype::kF32) {
    float value;
    std::memcpy(&value, &plane[4 * index], 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, &plane[2 * index], 2);
  return Bf16ToFloat(half);
}

TEST(KvWrite, PutsEachValueInItsPlaceAndZerosInThePadding) {
  std::mt19937_64 rng(testing_support::TestSeed());
  std::normal_distribution<float> normal;
  for (const KvDtype dtype : {KvDtype::kBf16, KvDtype::kF32}) {
    const int words = KvWordValues(dtype);
    for (const int dim : {16, 24, 32, 128, 576}) {
      const int padded = PadDim(dim);
      for (const int slot : {0, 1, 15, 16, 63}) {
        std::vector<float> values(dim);
        for (float& value : values) value = normal(rng);
        const std::byte old{0x41};
        std::vector<std::byte> k(int64_t{kBlockTokens} * padded * KvDtypeBytes(dtype), old);
        std::vector<std::byte> v = k;
        WriteKey(slot, dim, padded, dtype, values.data(), k.data());
        WriteValue(slot, dim, padded, dtype, values.data(), v.data());
        const float untouched = Read(std::vector<std::byte>(4, old), 0, dtype);
        for (int t = 0; t < kBlockTokens; ++t) {
          for (int d = 0; d < padded; ++d) {
            float want = untouched;
            if (t == slot) want = d < dim ? values[d] : 0.0f;
            if (t == slot && dtype == KvDtype::kBf16) want = Bf16ToFloat(FloatToBf16(want));
            ASSERT_EQ(Read(k, KIndex(t, d, padded, words), dtype), want) << t << ", " << d;
            ASSERT_EQ(Read(v, VIndex(t, d, padded, words), dtype), want) << t << ", " << d;
          }
        }
      }
    }
  }
}

TEST(KvWrite, RoundsToNearestAndTiesToEven) {
  // Between 1 and 1 + 2^-7 lie, in bf16, nothing else: below, at, and above the middle.
  const std::vector<float> values = {1 + 0x0.ffp-8f, 1 + 0x1p-8f, 1 + 0x1.01p-8f, 1 + 0x3p-8f,
                                     -1 - 0x1p-8f,   NAN,         INFINITY,       0x1.ffffp127f};
  std::vector<std::byte> k(64 * 32 * 2);
  WriteKey(5, 8, 32, KvDtype::kBf16, values.data(), k.data());
  const auto at = [&](int d) { return Read(k, KIndex(5, d, 32, 2), KvDtype::kBf16); };
  EXPECT_EQ(at(0), 1.0f);
  EXPECT_EQ(at(1), 1.0f);
  EXPECT_EQ(at(2), 1 + 0x1p-7f);
  EXPECT_EQ(at(3), 1 + 0x1p-6f);
  EXPECT_EQ(at(4), -1.0f);
  EXPECT_TRUE(std::isnan(at(5)));
  EXPECT_EQ(at(6), INFINITY);
  EXPECT_EQ(at(7), INFINITY);
}

}  // namespace
}  // namespace writescope::kernels
