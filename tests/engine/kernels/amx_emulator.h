// The tile registers of AMX in plain C++, so that a kernel written for them runs anywhere: the
// instructions of amx_tiles.h, with the checks that raise #UD on hardware.
//
// tdpbf16ps as its manual has it: the even products of a dot are summed in float, the odd ones
// apart, each rounded to nearest; denormals are zero. A product of two bf16 values is exact in
// float, so a multiplication and an addition are the fused operation.
#pragma once

#include <cstdint>
#include <cstring>

#include "engine/base/bf16.h"
#include "engine/base/check.h"
#include "engine/kernels/amx_tiles.h"

namespace writescope::kernels {
namespace {

struct EmulatedTileState {
  static constexpr int kNumTiles = 8;
  static constexpr int kRowBytes = 64;
  bool is_configured = false;
  TileConfig config;
  std::byte tiles[kNumTiles][16 * kRowBytes] = {};
};

class EmulatedTiles {
 public:
  static void Configure(const TileConfig& config) {
    CHECK_EQ(int{config.palette}, 1);
    CHECK_EQ(int{config.start_row}, 0);
    for (int i = 0; i < 16; ++i) {
      CHECK_LE(int{config.rows[i]}, 16);
      CHECK_LE(int{config.row_bytes[i]}, 64);
      CHECK((config.rows[i] == 0) == (config.row_bytes[i] == 0)) << "tile " << i;
      CHECK(i < kNumTiles || config.rows[i] == 0) << "there is no tile " << i;
    }
    state_ = {};
    state_.config = config;
    state_.is_configured = true;
  }
  static void Release() { state_ = {}; }
  static bool is_released() { return !state_.is_configured; }

  template <int kTile>
  static void Zero() {
    std::memset(Tile(kTile), 0, sizeof(state_.tiles[0]));
  }
  template <int kTile>
  static void Load(const void* from, int64_t stride_bytes) {
    Zero<kTile>();
    for (int r = 0; r < state_.config.rows[kTile]; ++r) {
      std::memcpy(Tile(kTile) + r * kRowBytes,
                  static_cast<const std::byte*>(from) + r * stride_bytes,
                  state_.config.row_bytes[kTile]);
    }
  }
  template <int kTile>
  static void Store(void* to, int64_t stride_bytes) {
    for (int r = 0; r < state_.config.rows[kTile]; ++r) {
      std::memcpy(static_cast<std::byte*>(to) + r * stride_bytes, Tile(kTile) + r * kRowBytes,
                  state_.config.row_bytes[kTile]);
    }
  }
  template <int kSum, int kA, int kB>
  static void AddProducts() {
    static_assert(kSum != kA && kSum != kB && kA != kB, "three tiles");
    const TileConfig& c = state_.config;
    CHECK_EQ(int{c.rows[kSum]}, int{c.rows[kA]});
    CHECK_EQ(int{c.row_bytes[kSum]}, int{c.row_bytes[kB]});
    CHECK_EQ(c.row_bytes[kA] / 4, int{c.rows[kB]});
    const int num_columns = c.row_bytes[kB] / 4;
    float b_even[16][16], b_odd[16][16];
    for (int k = 0; k < c.rows[kB]; ++k) {
      for (int n = 0; n < num_columns; ++n) {
        b_even[k][n] = Half(kB, k, 2 * n);
        b_odd[k][n] = Half(kB, k, 2 * n + 1);
      }
    }
    for (int m = 0; m < c.rows[kA]; ++m) {
      float even[16] = {}, odd[16] = {}, sum[16];
      for (int k = 0; k < c.rows[kB]; ++k) {
        const float a_even = Half(kA, m, 2 * k), a_odd = Half(kA, m, 2 * k + 1);
        for (int n = 0; n < 16; ++n) {
          even[n] += a_even * b_even[k][n];
          odd[n] += a_odd * b_odd[k][n];
        }
      }
      std::byte* row = Tile(kSum) + m * kRowBytes;
      std::memcpy(sum, row, sizeof(sum));
      for (int n = 0; n < num_columns; ++n) sum[n] += even[n] + odd[n];
      std::memcpy(row, sum, sizeof(sum));
    }
  }

 private:
  static constexpr int kNumTiles = EmulatedTileState::kNumTiles;
  static constexpr int kRowBytes = EmulatedTileState::kRowBytes;

  static std::byte* Tile(int tile) {
    CHECK(state_.is_configured) << "no configuration is loaded";
    CHECK(state_.config.rows[tile] > 0) << "tile " << tile;
    return state_.tiles[tile];
  }
  static float Half(int tile, int row, int column) {
    uint16_t bits;
    std::memcpy(&bits, Tile(tile) + row * kRowBytes + 2 * column, sizeof(bits));
    if ((bits & 0x7f80u) == 0) bits &= 0x8000u;
    return Bf16ToFloat(bits);
  }

  static inline thread_local EmulatedTileState state_;
};

}  // namespace
}  // namespace writescope::kernels
