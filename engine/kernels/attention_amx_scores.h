// Scores of a panel of 16 rows against a whole block, on the tile registers of AMX: what the
// kernels for planes of values and for latents begin with. Included by the files of one instruction
// set only; see simd_vec.h.
//
// The panel's queries are A, a K tile is B as it lies: 16 pairs of dims x 16 tokens. A product
// takes a cycle for each row of A, so registers that hold what belongs to the panel's rows may be
// configured for fewer of them; register 2 holds K or V. The lines of an operand are fetched into
// the first cache some loads earlier: else every product would wait for its own.
//
// As few registers as will do are in use, at most six. Where two hyper-threads share a core they
// share what stands behind the registers' names, and a load that finds none free waits for the
// product before. A load and its product, 7 ns where the core is one's own, then take (Emerald
// Rapids) 23 ns with eight registers in use, 15 with six, 12.5 with five and 9 with three.
#pragma once

#include "engine/kernels/amx_tiles.h"
#include "engine/kernels/attention_bf16_panels.h"

namespace writescope::kernels {
namespace {

// A tile load takes its lines one after the other: they are brought from the second cache into the
// first before.
WRITESCOPE_INLINE void FetchTile(const std::byte* at, int64_t row_bytes) {
#pragma GCC unroll 16
  for (int i = 0; i < kPanelRows; ++i) __builtin_prefetch(at + i * row_bytes, 0, 3);
}

template <typename Tiles>
class AmxScores {
 public:
  static constexpr bool kWholeTiles = true;
  static void AttendInF32(const FlatAttentionArgs& args) { Tiles::AttendInF32(args); }

  explicit AmxScores(int num_rows) {
    TileConfig config;
    for (const int tile : {0, 1, 3, 4, 5}) config.rows[tile] = static_cast<uint8_t>(num_rows);
    for (const int tile : {6, 7}) {
      config.rows[tile] = 0;
      config.row_bytes[tile] = 0;
    }
    Tiles::Configure(config);
  }
  ~AmxScores() { Tiles::Release(); }
  AmxScores(const AmxScores&) = delete;
  AmxScores& operator=(const AmxScores&) = delete;

 protected:
  static constexpr int64_t kTileBytes = int64_t{kPanelRows} * kLineBytes;

  // Where the scores of 16 tokens go, for all tiles of a block: the first value of a tile, from a
  // tile to the next, and from a row to the next.
  struct ScorePlace {
    float* first;
    int64_t tile_values;
    int64_t row_values;

    float* tile(int t) const { return first + t * tile_values; }
    int64_t row_bytes() const { return row_values * static_cast<int64_t>(sizeof(float)); }
  };

  // Two tiles of 16 tokens at a time, whose dims lie one after the other.
  void Score(const std::byte* k, int k_dim, QueryTiles q, const ScorePlace& scores,
             LinesAhead& ahead, int64_t lines) {
    const int num_tiles = k_dim / kTileDims;
    const int64_t token_step = num_tiles * kTileBytes;
    FetchedLines fetched = ahead.Take(lines, int64_t{kTilesPerBlock} * num_tiles);
    for (int t = 0; t < kTilesPerBlock; t += 2, k += 2 * token_step) {
      Tiles::template Zero<0>();
      Tiles::template Zero<1>();
      for (int tile = 0; tile < num_tiles; ++tile) {
        const std::byte* const now = k + tile * kTileBytes;
        // After the last one comes the first of the next 16 tokens but those that are read beside.
        const std::byte* const next = now + kTileBytes + (tile + 1 < num_tiles ? 0 : token_step);
        Tiles::template Load<3>(q[tile], kLineBytes);
        Tiles::template Load<2>(now, kLineBytes);
        FetchTile(next, kLineBytes);
        Tiles::template AddProducts<0, 3, 2>();
        fetched.Step();
        Tiles::template Load<2>(now + token_step, kLineBytes);
        FetchTile(next + token_step, kLineBytes);
        Tiles::template AddProducts<1, 3, 2>();
        fetched.Step();
      }
      Tiles::template Store<0>(scores.tile(t), scores.row_bytes());
      Tiles::template Store<1>(scores.tile(t + 1), scores.row_bytes());
    }
  }
};

}  // namespace
}  // namespace writescope::kernels
