// Scores and weights of a panel of 16 rows against a whole block, on the tile registers of AMX:
// what the kernels for planes of values and for latents begin with. Included by the files of one
// instruction set only; see simd_vec.h.
//
// The panel's queries are A, a K tile is B as it lies: 16 pairs of dims x 16 tokens. A panel that
// is not full costs what a full one does.
#pragma once

#include "engine/kernels/amx_tiles.h"
#include "engine/kernels/attention_bf16_panels.h"

namespace writescope::kernels {
namespace {

// A tile load takes its lines one after the other: they are brought from the second cache into the
// first while the tile before is multiplied. 14 threads of Emerald Rapids, which read 155 GB/s,
// attend at 144 with it and at 135 without (Qwen3's shape).
WRITESCOPE_INLINE void FetchTile(const std::byte* at, int64_t row_bytes) {
#pragma GCC unroll 16
  for (int i = 0; i < kPanelRows; ++i) __builtin_prefetch(at + i * row_bytes, 0, 3);
}

template <typename Tiles>
class AmxScores {
 public:
  static constexpr bool kWholeTiles = true;
  static void AttendInF32(const FlatAttentionArgs& args) { Tiles::AttendInF32(args); }

  AmxScores() { Tiles::Configure(TileConfig()); }
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

  void Score(const std::byte* k, int k_dim, QueryTiles q, const ScorePlace& scores,
             LinesAhead& ahead, int64_t lines) {
    if (k_dim <= 4 * kTileDims) {
      ScoreNarrow(k, k_dim, q, scores, ahead, lines);
    } else {
      ScoreWide(k, k_dim, q, scores, ahead, lines);
    }
  }

  // Up to 128 dims: the queries stay in registers and K is read as it lies.
  void ScoreNarrow(const std::byte* k, int k_dim, QueryTiles q, const ScorePlace& scores,
                   LinesAhead& ahead, int64_t lines) {
    const int num_tiles = k_dim / kTileDims;
    FetchedLines fetched = ahead.Take(lines, int64_t{kTilesPerBlock} * num_tiles);
    Tiles::template Load<0>(q[0], kLineBytes);
    if (num_tiles > 1) Tiles::template Load<1>(q[1], kLineBytes);
    if (num_tiles > 2) Tiles::template Load<2>(q[2], kLineBytes);
    if (num_tiles > 3) Tiles::template Load<3>(q[3], kLineBytes);
    for (int t = 0; t < kTilesPerBlock; t += 2) {
      ScoreTile<4>(k, num_tiles, fetched);
      ScoreTile<5>(k + num_tiles * kTileBytes, num_tiles, fetched);
      k += 2 * num_tiles * kTileBytes;
      Tiles::template Store<4>(scores.tile(t), scores.row_bytes());
      Tiles::template Store<5>(scores.tile(t + 1), scores.row_bytes());
    }
  }
  template <int kSum>
  static void ScoreTile(const std::byte* k, int num_tiles, FetchedLines& fetched) {
    for (int i = 0; i < num_tiles; ++i) {  // Of the 16 tokens after
      FetchTile(k + (num_tiles + i) * kTileBytes, kLineBytes);
    }
    Tiles::template Zero<kSum>();
    Tiles::template Load<6>(k, kLineBytes);
    Tiles::template AddProducts<kSum, 0, 6>();
    fetched.Step();
    if (num_tiles > 1) {
      Tiles::template Load<7>(k + kTileBytes, kLineBytes);
      Tiles::template AddProducts<kSum, 1, 7>();
      fetched.Step();
    }
    if (num_tiles > 2) {
      Tiles::template Load<6>(k + 2 * kTileBytes, kLineBytes);
      Tiles::template AddProducts<kSum, 2, 6>();
      fetched.Step();
    }
    if (num_tiles > 3) {
      Tiles::template Load<7>(k + 3 * kTileBytes, kLineBytes);
      Tiles::template AddProducts<kSum, 3, 7>();
      fetched.Step();
    }
  }

  void ScoreWide(const std::byte* k, int k_dim, QueryTiles q, const ScorePlace& scores,
                 LinesAhead& ahead, int64_t lines) {
    const int64_t token_step = int64_t{kTileTokens} * k_dim * 2;
    FetchedLines fetched = ahead.Take(lines, int64_t{kTilesPerBlock} * k_dim / kTileDims);
    Tiles::template Zero<0>();
    Tiles::template Zero<1>();
    Tiles::template Zero<2>();
    Tiles::template Zero<3>();
    for (int64_t tile = 0; tile < k_dim / kTileDims; ++tile) {
      const std::byte* k_tile = k + tile * kTileBytes;
      Tiles::template Load<4>(q[tile], kLineBytes);
      Tiles::template Load<5>(k_tile, kLineBytes);
      Tiles::template AddProducts<0, 4, 5>();
      fetched.Step();
      Tiles::template Load<6>(k_tile + token_step, kLineBytes);
      Tiles::template AddProducts<1, 4, 6>();
      fetched.Step();
      Tiles::template Load<7>(k_tile + 2 * token_step, kLineBytes);
      Tiles::template AddProducts<2, 4, 7>();
      fetched.Step();
      Tiles::template Load<5>(k_tile + 3 * token_step, kLineBytes);
      Tiles::template AddProducts<3, 4, 5>();
      fetched.Step();
    }
    Tiles::template Store<0>(scores.tile(0), scores.row_bytes());
    Tiles::template Store<1>(scores.tile(1), scores.row_bytes());
    Tiles::template Store<2>(scores.tile(2), scores.row_bytes());
    Tiles::template Store<3>(scores.tile(3), scores.row_bytes());
  }
};

}  // namespace
}  // namespace writescope::kernels
