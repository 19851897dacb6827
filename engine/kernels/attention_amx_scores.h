// Scores of a panel of 16 rows against a whole block, on the tile registers of AMX: what the
// kernels for planes of values and for latents begin with. Included by the files of one instruction
// set only; see simd_vec.h.
//
// The panel's queries are A, a K tile is B as it lies: 16 pairs of dims x 16 tokens. A product
// takes a cycle for each row of A, so registers 0 to 3, 6 and 7, which hold what belongs to the
// panel's rows, may be configured for fewer of them; 4 and 5 hold K or V. An operand is loaded as
// soon as the product before has read its register, and its lines are fetched into the first cache
// one load earlier still: else every product would wait for its own load.
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
    for (const int tile : {0, 1, 2, 3, 6, 7}) config.rows[tile] = static_cast<uint8_t>(num_rows);
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
    const int64_t token_step = num_tiles * kTileBytes;
    Tiles::template Load<4>(k, kLineBytes);
    Tiles::template Load<5>(k + token_step, kLineBytes);
    for (int t = 0; t < kTilesPerBlock; t += 2, k += 2 * token_step) {
      const bool is_last = t + 2 == kTilesPerBlock;
      const std::byte* const after = is_last ? nullptr : k + 2 * token_step;
      Tiles::template Zero<6>();
      Tiles::template Zero<7>();
      ScoreDims<0>(k, num_tiles, after, fetched);
      if (num_tiles > 1) ScoreDims<1>(k, num_tiles, after, fetched);
      if (num_tiles > 2) ScoreDims<2>(k, num_tiles, after, fetched);
      if (num_tiles > 3) ScoreDims<3>(k, num_tiles, after, fetched);
      Tiles::template Store<6>(scores.tile(t), scores.row_bytes());
      Tiles::template Store<7>(scores.tile(t + 1), scores.row_bytes());
    }
  }
  // 32 dims of two times 16 tokens, whose first dims lie at k; `after` is where the next ones do.
  template <int kQuery>
  static void ScoreDims(const std::byte* k, int num_tiles, const std::byte* after,
                        FetchedLines& fetched) {
    const int64_t token_step = num_tiles * kTileBytes;
    const std::byte* const next = kQuery + 1 < num_tiles ? k + (kQuery + 1) * kTileBytes : after;
    const std::byte* const fetch = kQuery + 2 < num_tiles
                                       ? k + (kQuery + 2) * kTileBytes
                                       : k + (kQuery + 2 + num_tiles) * kTileBytes;
    FetchTile(fetch, kLineBytes);
    Tiles::template AddProducts<6, kQuery, 4>();
    if (next != nullptr) Tiles::template Load<4>(next, kLineBytes);
    fetched.Step();
    FetchTile(fetch + token_step, kLineBytes);
    Tiles::template AddProducts<7, kQuery, 5>();
    if (next != nullptr) Tiles::template Load<5>(next + token_step, kLineBytes);
    fetched.Step();
  }

  void ScoreWide(const std::byte* k, int k_dim, QueryTiles q, const ScorePlace& scores,
                 LinesAhead& ahead, int64_t lines) {
    const int num_tiles = k_dim / kTileDims;
    const int64_t token_step = num_tiles * kTileBytes;
    FetchedLines fetched = ahead.Take(lines, int64_t{kTilesPerBlock} * num_tiles);
    Tiles::template Zero<0>();
    Tiles::template Zero<1>();
    Tiles::template Zero<2>();
    Tiles::template Zero<3>();
    Tiles::template Load<6>(q[0], kLineBytes);
    Tiles::template Load<7>(q[1], kLineBytes);
    Tiles::template Load<4>(k, kLineBytes);
    Tiles::template Load<5>(k + token_step, kLineBytes);
    for (int tile = 0; tile < num_tiles; tile += 2) {
      ScoreTile<6>(k, tile, num_tiles, q, fetched);
      if (tile + 1 < num_tiles) ScoreTile<7>(k, tile + 1, num_tiles, q, fetched);
    }
    Tiles::template Store<0>(scores.tile(0), scores.row_bytes());
    Tiles::template Store<1>(scores.tile(1), scores.row_bytes());
    Tiles::template Store<2>(scores.tile(2), scores.row_bytes());
    Tiles::template Store<3>(scores.tile(3), scores.row_bytes());
  }
  // 32 dims of 64 tokens. Past the last ones what is there is loaded again.
  template <int kQuery>
  static void ScoreTile(const std::byte* k, int tile, int num_tiles, QueryTiles q,
                        FetchedLines& fetched) {
    const int64_t token_step = num_tiles * kTileBytes;
    const int last = num_tiles - 1;
    const int next_tile = tile < last ? tile + 1 : last,
              later_tile = tile + 2 < last ? tile + 2 : last;
    const std::byte* const now = k + tile * kTileBytes;
    const std::byte* const next = k + next_tile * kTileBytes;
    const std::byte* const later = k + later_tile * kTileBytes;
    FetchTile(next + 2 * token_step, kLineBytes);
    Tiles::template AddProducts<0, kQuery, 4>();
    Tiles::template Load<4>(now + 2 * token_step, kLineBytes);
    fetched.Step();
    FetchTile(next + 3 * token_step, kLineBytes);
    Tiles::template AddProducts<1, kQuery, 5>();
    Tiles::template Load<5>(now + 3 * token_step, kLineBytes);
    fetched.Step();
    FetchTile(later, kLineBytes);
    Tiles::template AddProducts<2, kQuery, 4>();
    Tiles::template Load<4>(next, kLineBytes);
    fetched.Step();
    FetchTile(later + token_step, kLineBytes);
    Tiles::template AddProducts<3, kQuery, 5>();
    Tiles::template Load<kQuery>(q[later_tile], kLineBytes);
    Tiles::template Load<5>(next + token_step, kLineBytes);
    fetched.Step();
  }
};

}  // namespace
}  // namespace writescope::kernels
