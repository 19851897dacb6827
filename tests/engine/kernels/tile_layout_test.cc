// The maps of tile_layout.h, and the claim they rest on: the tiles are the operands of the matrix
// units as they lie. mma.m16n8k16 and TDPBF16PS are emulated here, lane by lane, so that the maps
// are tested on a machine that has neither.
#include "engine/base/tile_layout.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "engine/base/bf16.h"
#include "tests/support/seed.h"

namespace writescope {
namespace {

template <typename Index>
void ExpectBijection(int num_tokens, int num_dims, const Index& index) {
  std::vector<int> hits(static_cast<size_t>(num_tokens) * num_dims);
  for (int t = 0; t < num_tokens; ++t) {
    for (int d = 0; d < num_dims; ++d) {
      const int64_t at = index(t, d);
      ASSERT_GE(at, 0);
      ASSERT_LT(at, static_cast<int64_t>(hits.size()));
      ++hits[at];
    }
  }
  for (const int count : hits) ASSERT_EQ(count, 1);
}

TEST(TileLayout, EveryValueHasAPlaceOfItsOwn) {
  for (const int dim : {32, 64, 96, 128, 192, 512, 576}) {
    for (const int values : {1, 2}) {
      ExpectBijection(kBlockTokens, dim, [&](int t, int d) { return KIndex(t, d, dim, values); });
      ExpectBijection(kBlockTokens, dim, [&](int t, int d) { return VIndex(t, d, dim, values); });
    }
  }
}

TEST(TileLayout, ATileOfAPlaneIsContiguous) {
  for (const int values : {1, 2}) {
    for (int tile = 0; tile < kTilesPerBlock; ++tile) {
      for (int t = 0; t < kTileTokens; ++t) {
        for (int d = 0; d < 64; ++d) {
          const int token = tile * kTileTokens + t;
          EXPECT_EQ(KIndex(token, d, 64, values) / (kTileTokens * 64), tile);
          EXPECT_EQ(VIndex(token, d, 64, values) / (kTileTokens * 64), tile);
        }
      }
    }
  }
}

TEST(TileLayout, SizesOfAGeometry) {
  const KvGeometry gqa{.num_kv_heads = 4,
                       .k_dim = 192,
                       .v_dim = 128,
                       .value_in_key = false,
                       .dtype = KvDtype::kBf16};
  EXPECT_EQ(gqa.k_plane_bytes(), 64 * 192 * 2);
  EXPECT_EQ(gqa.v_plane_bytes(), 64 * 128 * 2);
  EXPECT_EQ(gqa.block_bytes(), 4 * 64 * 320 * 2);
  const KvGeometry latent{
      .num_kv_heads = 1, .k_dim = 576, .v_dim = 512, .value_in_key = true, .dtype = KvDtype::kF32};
  EXPECT_EQ(latent.v_plane_bytes(), 0);
  EXPECT_EQ(latent.block_bytes(), 64 * 576 * 4);
  EXPECT_EQ(PadDim(16), 32);
  EXPECT_EQ(PadDim(24), 32);
  EXPECT_EQ(PadDim(576), 576);
}

// One KV head of one block in bf16, and dense copies of it.
class TileOperands : public testing::Test {
 protected:
  static constexpr int kDim = 64;

  void SetUp() override {
    std::mt19937_64 rng(testing_support::TestSeed());
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>* values, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        values->push_back(Bf16ToFloat(FloatToBf16(normal(rng))));
      }
    };
    fill(&k_, kBlockTokens * kDim);
    fill(&v_, kBlockTokens * kDim);
    fill(&q_, 16 * kDim);
    fill(&p_, 16 * kBlockTokens);
    k_halves_.resize(kBlockTokens * kDim);
    v_halves_.resize(kBlockTokens * kDim);
    for (int t = 0; t < kBlockTokens; ++t) {
      for (int d = 0; d < kDim; ++d) {
        k_halves_[KIndex(t, d, kDim, 2)] = FloatToBf16(k_[t * kDim + d]);
        v_halves_[VIndex(t, d, kDim, 2)] = FloatToBf16(v_[t * kDim + d]);
      }
    }
  }

  static uint32_t Word(const std::vector<uint16_t>& halves, int64_t word) {
    return halves[2 * word] | static_cast<uint32_t>(halves[2 * word + 1]) << 16;
  }
  // Word (pair p, token n) of a K tile; word (token pair r, dim d) of the V plane.
  uint32_t KWord(int tile, int p, int n) const {
    return Word(k_halves_, int64_t{tile} * kTileTokens * kDim / 2 + p * kTileTokens + n);
  }
  uint32_t VWord(int r, int d) const { return Word(v_halves_, int64_t{r} * kDim + d); }
  static uint32_t Pair(float low, float high) {
    return FloatToBf16(low) | static_cast<uint32_t>(FloatToBf16(high)) << 16;
  }
  uint32_t QPair(int row, int d) const { return Pair(q_[row * kDim + d], q_[row * kDim + d + 1]); }
  uint32_t PPair(int row, int t) const {
    return Pair(p_[row * kBlockTokens + t], p_[row * kBlockTokens + t + 1]);
  }
  double Score(int row, int token) const {
    double sum = 0;
    for (int d = 0; d < kDim; ++d) {
      sum += static_cast<double>(q_[row * kDim + d]) * k_[token * kDim + d];
    }
    return sum;
  }
  // Over the first num_tokens tokens, with values taken from `values` [token][dim].
  double Output(const std::vector<float>& values, int row, int dim, int num_tokens) const {
    double sum = 0;
    for (int t = 0; t < num_tokens; ++t) {
      sum += static_cast<double>(p_[row * kBlockTokens + t]) * values[t * kDim + dim];
    }
    return sum;
  }

  std::vector<float> k_, v_;  // [64, kDim]
  std::vector<float> q_;      // [16, kDim]
  std::vector<float> p_;      // [16, 64]
  std::vector<uint16_t> k_halves_, v_halves_;
};

constexpr double kProductError = 1e-4;  // Sums of up to 64 products of N(0, 1) values in float.

float Low(uint32_t word) { return Bf16ToFloat(static_cast<uint16_t>(word)); }
float High(uint32_t word) { return Bf16ToFloat(static_cast<uint16_t>(word >> 16)); }

// mma.m16n8k16: registers of the 32 lanes. A holds 16 x 16 values as pairs along k, B 16 x 8, C 16
// x 8.
using FragmentA = std::array<std::array<uint32_t, 4>, 32>;
using FragmentB = std::array<std::array<uint32_t, 2>, 32>;
struct Accumulators {
  float at[16][8] = {};
};

void EmulateMma(const FragmentA& a, const FragmentB& b, Accumulators* c) {
  float a_dense[16][16], b_dense[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane >> 2, t = lane & 3;
    for (int r = 0; r < 4; ++r) {
      const int row = g + 8 * (r & 1), k = 2 * t + 8 * (r >> 1);
      a_dense[row][k] = Low(a[lane][r]);
      a_dense[row][k + 1] = High(a[lane][r]);
    }
    for (int r = 0; r < 2; ++r) {
      b_dense[2 * t + 8 * r][g] = Low(b[lane][r]);
      b_dense[2 * t + 8 * r + 1][g] = High(b[lane][r]);
    }
  }
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      for (int k = 0; k < 16; ++k) c->at[m][n] += a_dense[m][k] * b_dense[k][n];
    }
  }
}

TEST_F(TileOperands, MmaScoresWithKeysAsB) {
  for (int tile = 0; tile < kTilesPerBlock; ++tile) {
    for (int h = 0; h < 2; ++h) {
      Accumulators c;
      for (int j = 0; j < kDim / 16; ++j) {
        FragmentA a;
        FragmentB b;
        for (int lane = 0; lane < 32; ++lane) {
          const int g = lane >> 2, t = lane & 3;
          for (int r = 0; r < 4; ++r) {
            a[lane][r] = QPair(g + 8 * (r & 1), 16 * j + 2 * t + 8 * (r >> 1));
          }
          for (int r = 0; r < 2; ++r) b[lane][r] = KWord(tile, 8 * j + t + 4 * r, 8 * h + g);
        }
        EmulateMma(a, b, &c);
      }
      for (int row = 0; row < 16; ++row) {
        for (int n = 0; n < 8; ++n) {
          EXPECT_NEAR(c.at[row][n], Score(row, tile * 16 + 8 * h + n), kProductError);
        }
      }
    }
  }
}

TEST_F(TileOperands, MmaTransposedScoresWithKeysAsA) {
  for (int heads = 0; heads < 16; heads += 8) {
    Accumulators c;
    for (int j = 0; j < kDim / 16; ++j) {
      FragmentA a;
      FragmentB b;
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane >> 2, t = lane & 3;
        for (int r = 0; r < 4; ++r) {
          a[lane][r] = KWord(1, 8 * j + t + 4 * (r >> 1), g + 8 * (r & 1));
        }
        for (int r = 0; r < 2; ++r) b[lane][r] = QPair(heads + g, 16 * j + 2 * t + 8 * r);
      }
      EmulateMma(a, b, &c);
    }
    for (int token = 0; token < 16; ++token) {
      for (int n = 0; n < 8; ++n) {
        EXPECT_NEAR(c.at[token][n], Score(heads + n, 16 + token), kProductError);
      }
    }
  }
}

TEST_F(TileOperands, MmaOutputWithValuesAsB) {
  for (int d0 = 0; d0 < kDim; d0 += 8) {
    Accumulators c;
    for (int tile = 0; tile < kTilesPerBlock; ++tile) {
      FragmentA a;
      FragmentB b;
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane >> 2, t = lane & 3;
        for (int r = 0; r < 4; ++r) {
          a[lane][r] = PPair(g + 8 * (r & 1), 16 * tile + 2 * t + 8 * (r >> 1));
        }
        for (int r = 0; r < 2; ++r) b[lane][r] = VWord(8 * tile + t + 4 * r, d0 + g);
      }
      EmulateMma(a, b, &c);
    }
    for (int row = 0; row < 16; ++row) {
      for (int n = 0; n < 8; ++n) {
        EXPECT_NEAR(c.at[row][n], Output(v_, row, d0 + n, kBlockTokens), kProductError);
      }
    }
  }
}

TEST_F(TileOperands, MmaTransposedOutputWithValuesAsA) {
  for (int d0 = 0; d0 < kDim; d0 += 16) {
    Accumulators c;
    for (int tile = 0; tile < kTilesPerBlock; ++tile) {
      FragmentA a;
      FragmentB b;
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane >> 2, t = lane & 3;
        for (int r = 0; r < 4; ++r) {
          a[lane][r] = VWord(8 * tile + t + 4 * (r >> 1), d0 + g + 8 * (r & 1));
        }
        for (int r = 0; r < 2; ++r) b[lane][r] = PPair(g, 16 * tile + 2 * t + 8 * r);
      }
      EmulateMma(a, b, &c);
    }
    for (int d = 0; d < 16; ++d) {
      for (int n = 0; n < 8; ++n) {
        EXPECT_NEAR(c.at[d][n], Output(v_, n, d0 + d, kBlockTokens), kProductError);
      }
    }
  }
}

// A byte permute as the GPU's PRMT: nibble i of the selector names byte i of the result.
uint32_t EmulatePrmt(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = x | static_cast<uint64_t>(y) << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> (8 * ((selector >> (4 * i)) & 7)) & 0xff) << (8 * i);
  }
  return result;
}

// A latent that is key and value: two words of neighbouring tokens give the token pairs of an even
// and of an odd dim, without a copy in V's format.
TEST_F(TileOperands, OneBytePermuteMakesValuesOfKeys) {
  for (int p = 0; p < kDim / 2; ++p) {
    for (int n = 0; n < kTileTokens; n += 2) {
      const uint32_t first = KWord(2, p, n), second = KWord(2, p, n + 1);
      const int token = 2 * kTileTokens + n;
      EXPECT_EQ(EmulatePrmt(first, second, 0x5410),
                Pair(k_[token * kDim + 2 * p], k_[(token + 1) * kDim + 2 * p]));
      EXPECT_EQ(EmulatePrmt(first, second, 0x7632),
                Pair(k_[token * kDim + 2 * p + 1], k_[(token + 1) * kDim + 2 * p + 1]));
    }
  }
}

// TDPBF16PS on tiles of 16 rows of 16 words: c[m][n] += the products of the pairs of row m of a and
// of column n of b.
struct AmxTile {
  uint32_t word[16][16];
};
void EmulateTdp(const AmxTile& a, const AmxTile& b, float (*c)[16]) {
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 16; ++n) {
        c[m][n] += Low(a.word[m][k]) * Low(b.word[k][n]);
        c[m][n] += High(a.word[m][k]) * High(b.word[k][n]);
      }
    }
  }
}
// As tileloadd: 16 rows of 64 bytes, `stride` words apart.
AmxTile LoadTile(const std::vector<uint16_t>& halves, int64_t first_word, int64_t stride) {
  AmxTile tile;
  for (int row = 0; row < 16; ++row) {
    for (int i = 0; i < 16; ++i) {
      const int64_t word = first_word + row * stride + i;
      tile.word[row][i] = halves[2 * word] | static_cast<uint32_t>(halves[2 * word + 1]) << 16;
    }
  }
  return tile;
}

TEST_F(TileOperands, AmxScoresWithKeysAsB) {
  for (int tile = 0; tile < kTilesPerBlock; ++tile) {
    float c[16][16] = {};
    for (int jj = 0; jj < kDim / 32; ++jj) {
      AmxTile a;
      for (int m = 0; m < 16; ++m) {
        for (int k = 0; k < 16; ++k) a.word[m][k] = QPair(m, 32 * jj + 2 * k);
      }
      // 1 KiB that lies together.
      EmulateTdp(a, LoadTile(k_halves_, tile * 8 * kDim + jj * 256, 16), c);
    }
    for (int row = 0; row < 16; ++row) {
      for (int n = 0; n < 16; ++n) {
        EXPECT_NEAR(c[row][n], Score(row, tile * 16 + n), kProductError);
      }
    }
  }
}

// The V tiles of a block are adjacent, so 16 token pairs load at one stride across a tile border.
TEST_F(TileOperands, AmxOutputWithValuesAsB) {
  for (int d0 = 0; d0 < kDim; d0 += 16) {
    float c[16][16] = {};
    for (int half = 0; half < 2; ++half) {
      AmxTile a;
      for (int m = 0; m < 16; ++m) {
        for (int k = 0; k < 16; ++k) a.word[m][k] = PPair(m, 32 * half + 2 * k);
      }
      EmulateTdp(a, LoadTile(v_halves_, half * 16 * kDim + d0, kDim), c);
    }
    for (int row = 0; row < 16; ++row) {
      for (int n = 0; n < 16; ++n) {
        EXPECT_NEAR(c[row][n], Output(v_, row, d0 + n, kBlockTokens), kProductError);
      }
    }
  }
}

// The latent tile as A, and probabilities with zeros between as B: even and odd dims apart.
TEST_F(TileOperands, AmxTransposedOutputWithLatentKeysAsA) {
  for (int pairs = 0; pairs < kDim / 2; pairs += 16) {
    float even[16][16] = {}, odd[16][16] = {};
    const AmxTile a = LoadTile(k_halves_, pairs * 16, 16);
    AmxTile b_even, b_odd;
    for (int token = 0; token < 16; ++token) {
      for (int row = 0; row < 16; ++row) {
        b_even.word[token][row] = Pair(p_[row * kBlockTokens + token], 0);
        b_odd.word[token][row] = Pair(0, p_[row * kBlockTokens + token]);
      }
    }
    EmulateTdp(a, b_even, even);
    EmulateTdp(a, b_odd, odd);
    for (int i = 0; i < 16; ++i) {
      for (int row = 0; row < 16; ++row) {
        EXPECT_NEAR(even[i][row], Output(k_, row, 2 * (pairs + i), 16), kProductError);
        EXPECT_NEAR(odd[i][row], Output(k_, row, 2 * (pairs + i) + 1, 16), kProductError);
      }
    }
  }
}

}  // namespace
}  // namespace writescope
