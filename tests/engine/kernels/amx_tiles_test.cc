// The emulator against plain sums, and the processor's tiles, where it has them, against the
// emulator.
#include "engine/kernels/amx_tiles.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "engine/base/bf16.h"
#include "engine/base/cpu_features.h"
#include "tests/engine/kernels/amx_emulator.h"
#include "tests/support/seed.h"

namespace writescope::kernels {
namespace {

using testing_support::TestSeed;

// A and B lie in memory with a stride of their own; C starts from what it holds.
struct Operands {
  static constexpr int kStride = 96;  // Bytes
  std::vector<uint16_t> a = std::vector<uint16_t>(16 * kStride / 2);
  std::vector<uint16_t> b = a;
  std::vector<float> c = std::vector<float>(16 * kStride / 4);
};

Operands RandomOperands(std::mt19937_64& rng) {
  std::normal_distribution<float> normal;
  Operands operands;
  for (uint16_t& value : operands.a) value = FloatToBf16(normal(rng));
  for (uint16_t& value : operands.b) value = FloatToBf16(normal(rng));
  for (float& value : operands.c) value = normal(rng);
  return operands;
}

// c += a b, twice, by way of a tile that was zeroed and one that was not.
template <typename Tiles>
std::vector<float> Multiply(Operands operands) {
  Tiles::Configure(TileConfig());
  Tiles::template Load<3>(operands.a.data(), Operands::kStride);
  Tiles::template Load<7>(operands.b.data(), Operands::kStride);
  Tiles::template Load<0>(operands.c.data(), Operands::kStride);
  Tiles::template AddProducts<0, 3, 7>();
  Tiles::template Store<0>(operands.c.data(), Operands::kStride);
  std::vector<float> product(16 * 16);
  Tiles::template Zero<5>();
  Tiles::template AddProducts<5, 3, 7>();
  Tiles::template Store<5>(product.data(), 64);
  Tiles::Release();
  operands.c.insert(operands.c.end(), product.begin(), product.end());
  return operands.c;
}

TEST(AmxTiles, TheEmulatorMultiplies) {
  std::mt19937_64 rng(TestSeed());
  const Operands operands = RandomOperands(rng);
  const std::vector<float> got = Multiply<EmulatedTiles>(operands);
  constexpr int kRow = Operands::kStride / 4;
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      double want = 0;
      for (int k = 0; k < 32; ++k) {
        want += static_cast<double>(Bf16ToFloat(operands.a[2 * kRow * m + k])) *
                Bf16ToFloat(operands.b[2 * kRow * (k / 2) + 2 * n + k % 2]);
      }
      EXPECT_NEAR(got[16 * kRow + 16 * m + n], want, 1e-5);
      EXPECT_NEAR(got[kRow * m + n], want + operands.c[kRow * m + n], 1e-5);
    }
    // What lies between the rows is not touched.
    for (int n = 16; n < kRow; ++n) EXPECT_EQ(got[kRow * m + n], operands.c[kRow * m + n]);
  }
}

TEST(AmxTilesDeathTest, TheEmulatorNeedsAConfiguration) {
  EXPECT_DEATH(EmulatedTiles::Zero<0>(), "no configuration");
  TileConfig short_tile;
  short_tile.rows[7] = 8;
  EXPECT_DEATH(
      {
        EmulatedTiles::Configure(short_tile);
        (EmulatedTiles::AddProducts<0, 3, 7>());
      },
      "");
}

TEST(AmxTiles, TheProcessorDoesAsTheEmulator) {
  if (DetectedCpuIsa() < CpuIsa::kAmx) GTEST_SKIP() << "this processor does not offer AMX";
  std::mt19937_64 rng(TestSeed());
  for (int i = 0; i < 100; ++i) {
    const Operands operands = RandomOperands(rng);
    const std::vector<float> want = Multiply<EmulatedTiles>(operands);
    const std::vector<float> got = Multiply<AmxTiles>(operands);
    EXPECT_EQ(std::memcmp(got.data(), want.data(), want.size() * sizeof(float)), 0);
  }
}

}  // namespace
}  // namespace writescope::kernels
