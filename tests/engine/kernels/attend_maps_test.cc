// The GPU kernels' maps, without a GPU: mma.m16n8k16 and prmt are emulated lane by lane, and the
// kernels' loads are done by the same maps on tiles.
#include "engine/kernels/cuda/attend_maps.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "engine/base/bf16.h"
#include "tests/support/seed.h"

namespace writescope::kernels {
namespace {

constexpr int kRows = 16;
constexpr int kKDim = 96;
constexpr int kVDim = 64;

using FragmentA = std::array<std::array<uint32_t, 4>, kWarpLanes>;
using FragmentB = std::array<std::array<uint32_t, 2>, kWarpLanes>;
using FragmentC = std::array<std::array<float, 4>, kWarpLanes>;

float Half(uint32_t word, int i) { return Bf16ToFloat(static_cast<uint16_t>(word >> (16 * i))); }

// As the PTX manual gives the places of the fragments; shares nothing with the maps under test.
void EmulateMma(const FragmentA& a, const FragmentB& b, FragmentC* c) {
  float a_at[16][16], b_at[16][8];
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const int group = lane >> 2, in_group = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
      const int col = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
      a_at[row][col] = Half(a[lane][i / 2], i % 2);
    }
    for (int i = 0; i < 4; ++i) {
      b_at[in_group * 2 + (i & 1) + (i < 2 ? 0 : 8)][group] = Half(b[lane][i / 2], i % 2);
    }
  }
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = (lane >> 2) + (i < 2 ? 0 : 8), col = lane % 4 * 2 + (i & 1);
      for (int k = 0; k < 16; ++k) (*c)[lane][i] += a_at[row][k] * b_at[k][col];
    }
  }
}

uint32_t EmulatePrmt(uint32_t a, uint32_t b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= static_cast<uint32_t>(bytes >> (8 * ((selector >> (4 * i)) & 7)) & 0xff) << (8 * i);
  }
  return out;
}

// A unit of 32 tokens as planes, and weights and queries of 16 rows; all of integers, so that sums
// are exact.
class AttendMaps : public testing::Test {
 protected:
  void SetUp() override {
    std::mt19937_64 rng(testing_support::TestSeed());
    const auto fill = [&](std::vector<float>* values, int count) {
      for (int i = 0; i < count; ++i) values->push_back(static_cast<float>(rng() % 17) - 8);
    };
    fill(&k_, kBlockTokens * kKDim);
    fill(&v_, kBlockTokens * kVDim);
    fill(&q_, kRows * kKDim);
    fill(&p_, kRows * kUnitTokens);
    k_plane_.resize(k_.size());
    v_plane_.resize(v_.size());
    for (int t = 0; t < kBlockTokens; ++t) {
      for (int d = 0; d < kKDim; ++d)
        k_plane_[KIndex(t, d, kKDim, 2)] = FloatToBf16(k_[t * kKDim + d]);
      for (int d = 0; d < kVDim; ++d)
        v_plane_[VIndex(t, d, kVDim, 2)] = FloatToBf16(v_[t * kVDim + d]);
    }
  }

  static std::array<uint32_t, 4> Chunk(const std::vector<uint16_t>& plane, int byte) {
    EXPECT_EQ(byte % kChunkBytes, 0);
    std::array<uint32_t, 4> words;
    std::memcpy(words.data(), reinterpret_cast<const char*>(plane.data()) + byte, kChunkBytes);
    return words;
  }
  static uint32_t Pair(float low, float high) {
    return FloatToBf16(low) | static_cast<uint32_t>(FloatToBf16(high)) << 16;
  }

  // As kernels pack weights out of the accumulators of the scores.
  FragmentA Weights(int tile) const {
    FragmentA a;
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int n = WeightProduct(i), c = WeightAccumulator(tile, i);
        const auto p = [&](int product) {
          return p_[AccumulatorRow(lane, c) * kUnitTokens + ScoreToken(lane, product, c)];
        };
        a[lane][i] = Pair(p(n), p(n + 1));
      }
    }
    return a;
  }

  std::vector<float> k_, v_;  // [64, dim]
  std::vector<float> q_;      // [16, kKDim]
  std::vector<float> p_;      // [16, 32]
  std::vector<uint16_t> k_plane_, v_plane_;
};

TEST_F(AttendMaps, ScoresOfAUnit) {
  FragmentC c[4] = {};
  for (int step = 0; step < kKDim / kStepDims; ++step) {
    FragmentA a;
    FragmentB b[4];
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int at = AccumulatorRow(lane, 2 * (i & 1)) * kKDim + step * kStepDims +
                       2 * LaneT(lane) + 8 * (i >> 1);
        a[lane][i] = Pair(q_[at], q_[at + 1]);
      }
      for (int r = 0; r < 2; ++r) {
        const auto words = Chunk(k_plane_, KeyTile(lane) * kTileTokens * kKDim * 2 +
                                               KeyRow(lane, step, r) * kKeyRowBytes +
                                               KeyChunk(lane) * kChunkBytes);
        for (int n = 0; n < 4; ++n) b[n][lane][r] = words[n];
      }
    }
    for (int n = 0; n < 4; ++n) EmulateMma(a, b[n], &c[n]);
  }
  std::set<std::pair<int, int>> seen;
  for (int n = 0; n < 4; ++n) {
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = AccumulatorRow(lane, i), token = ScoreToken(lane, n, i);
        float want = 0;
        for (int d = 0; d < kKDim; ++d) want += q_[row * kKDim + d] * k_[token * kKDim + d];
        EXPECT_EQ(c[n][lane][i], want) << "row " << row << " token " << token;
        seen.insert({row, token});
      }
    }
  }
  EXPECT_EQ(seen.size(), static_cast<size_t>(kRows * kUnitTokens));
}

TEST_F(AttendMaps, OutputOfAUnit) {
  std::set<std::pair<int, int>> seen;
  for (int group = 0; group < kVDim / kGroupDims; ++group) {
    FragmentC c[4] = {};
    for (int tile = 0; tile < 2; ++tile) {
      FragmentB b[4];
      for (int lane = 0; lane < kWarpLanes; ++lane) {
        for (int r = 0; r < 2; ++r) {
          const int dim = group * kGroupDims + ValueDim(lane);
          const auto words = Chunk(v_plane_, (ValueRow(lane, tile, r) * kVDim + dim) * 4);
          for (int n = 0; n < 4; ++n) b[n][lane][r] = words[n];
        }
      }
      for (int n = 0; n < 4; ++n) EmulateMma(Weights(tile), b[n], &c[n]);
    }
    for (int n = 0; n < 4; ++n) {
      for (int lane = 0; lane < kWarpLanes; ++lane) {
        for (int i = 0; i < 4; ++i) {
          const int row = AccumulatorRow(lane, i);
          const int dim = group * kGroupDims + OutDim(lane, n, i);
          float want = 0;
          for (int t = 0; t < kUnitTokens; ++t) {
            want += p_[row * kUnitTokens + t] * v_[t * kVDim + dim];
          }
          EXPECT_EQ(c[n][lane][i], want) << "row " << row << " dim " << dim;
          seen.insert({row, dim});
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), static_cast<size_t>(kRows * kVDim));
}

TEST_F(AttendMaps, OutputOfLatents) {
  std::set<std::pair<int, int>> seen;
  for (int group = 0; group < kKDim / 16; ++group) {
    FragmentC c[2] = {};
    for (int tile = 0; tile < 2; ++tile) {
      FragmentB b[2];
      for (int lane = 0; lane < kWarpLanes; ++lane) {
        const auto words = Chunk(k_plane_, tile * kTileTokens * kKDim * 2 +
                                               (group * 8 + LatentRow(lane)) * kKeyRowBytes +
                                               LatentChunk(lane) * kChunkBytes);
        for (int product = 0; product < 2; ++product) {
          for (int r = 0; r < 2; ++r) {
            b[product][lane][r] =
                EmulatePrmt(words[2 * r], words[2 * r + 1], LatentSelector(product));
          }
        }
      }
      for (int product = 0; product < 2; ++product)
        EmulateMma(Weights(tile), b[product], &c[product]);
    }
    for (int product = 0; product < 2; ++product) {
      for (int lane = 0; lane < kWarpLanes; ++lane) {
        for (int i = 0; i < 4; ++i) {
          const int row = AccumulatorRow(lane, i);
          const int dim = group * 16 + LatentOutDim(lane, product, i);
          float want = 0;
          for (int t = 0; t < kUnitTokens; ++t) {
            want += p_[row * kUnitTokens + t] * k_[t * kKDim + dim];
          }
          EXPECT_EQ(c[product][lane][i], want) << "row " << row << " dim " << dim;
          seen.insert({row, dim});
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), static_cast<size_t>(kRows * kKDim));
}

// A 16-byte load of a warp is served 8 lanes at a time: they must touch 32 different banks.
template <typename Address>
void ExpectNoConflict(const Address& address) {
  for (int first = 0; first < kWarpLanes; first += 8) {
    std::set<int> banks;
    for (int lane = first; lane < first + 8; ++lane)
      banks.insert(address(lane) % 128 / kChunkBytes);
    EXPECT_EQ(banks.size(), 8u) << "lanes from " << first;
  }
}

TEST(AttendSwizzles, LoadsOfSharedMemoryHitEachBankOnce) {
  for (const int k_dim : {32, 64, 96, 128, 192, 576}) {
    for (int step = 0; step < k_dim / kStepDims; ++step) {
      for (int r = 0; r < 2; ++r) {
        ExpectNoConflict([&](int lane) {
          const int row = KeyRow(lane, step, r);
          return KeyTile(lane) * kTileTokens * k_dim * 2 + row * kKeyRowBytes +
                 SwizzleKeyChunk(KeyTile(lane), row, KeyChunk(lane)) * kChunkBytes;
        });
      }
    }
    for (int tile = 0; tile < kTilesPerBlock; ++tile) {
      ExpectNoConflict([&](int lane) {
        return tile * kTileTokens * k_dim * 2 + LatentRow(lane) * kKeyRowBytes +
               SwizzleKeyChunk(tile, LatentRow(lane), LatentChunk(lane)) * kChunkBytes;
      });
    }
  }
  for (const int v_dim : {32, 64, 96, 128}) {
    for (int unit = 0; unit < kUnitsPerBlock; ++unit) {
      for (int tile = 0; tile < 2; ++tile) {
        for (int r = 0; r < 2; ++r) {
          ExpectNoConflict([&](int lane) {
            const int row = 16 * unit + ValueRow(lane, tile, r);
            return row * v_dim * 4 + SwizzleValueChunk(row, ValueDim(lane) / 4) * kChunkBytes;
          });
        }
      }
    }
  }
}

// The kernels work a row's swizzle out once for each lane.
TEST(AttendSwizzles, DependOnTheLaneAlone) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    for (int step = 0; step < 36; ++step) {
      for (int r = 0; r < 2; ++r) {
        EXPECT_EQ(SwizzleKeyChunk(0, KeyRow(lane, step, r), KeyChunk(lane)),
                  SwizzleKeyChunk(0, KeyRow(lane, 0, 0), KeyChunk(lane)));
      }
    }
    for (int r = 0; r < 2; ++r) {
      EXPECT_EQ(SwizzleValueChunk(ValueRow(lane, 0, r), 0),
                SwizzleValueChunk(ValueRow(lane, 0, 0), 0));
    }
  }
}

}  // namespace
}  // namespace writescope::kernels
