// Attention of a panel of 16 rows to a whole block on the tile registers of AMX. Included by the
// files of one instruction set only; see simd_vec.h.
//
// Scores: the panel's queries are A, a K tile is B as it lies: 16 pairs of dims x 16 tokens.
// Values of a plane of their own: weights are A [16 rows][32 tokens], 16 pair rows of V are B.
// Values in the key: the latent tile cannot be B again, since now tokens are summed over. It is A,
// 16 pairs of dims x 16 tokens, and the weights are B, with zeros between: {w, 0} meets the even
// dim of each pair, {0, w} the odd one. Half of the multiplications are by zero, which costs less
// than a transpose of the latent: the tile unit is far from busy when the keys come from memory.
// Sums come out as [dim][row]; they stay so over all blocks of a call and are transposed at its
// end.
//
// A panel that is not full costs what a full one does.
#pragma once

#include "engine/kernels/amx_tiles.h"
#include "engine/kernels/attention_bf16_panels.h"

namespace writescope::kernels {
namespace {

// 16 x 16 words, rows and columns exchanged.
WRITESCOPE_INLINE void TransposeTile(const float* from, float* to) {
  for (int row = 0; row < kPanelRows; row += kLanes) {
    for (int column = 0; column < kTileWords; column += kLanes) {
      WordVec rows[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const float* at = from + (row + i) * kTileWords + column;
        rows[i] = LoadWords(reinterpret_cast<const std::byte*>(at));
      }
      Transpose(rows);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        float* at = to + (column + i) * kTileWords + row;
        StoreWords(reinterpret_cast<std::byte*>(at), rows[i]);
      }
    }
  }
}

template <int... i>
WRITESCOPE_INLINE Vec ZipLow(Vec even, Vec odd, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(even, odd, (i / 2 + (i % 2) * kLanes)...);
}
template <int... i>
WRITESCOPE_INLINE Vec ZipHigh(Vec even, Vec odd, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(even, odd, (kLanes / 2 + i / 2 + (i % 2) * kLanes)...);
}

// The even lanes of two vectors, or the odd ones.
template <int odd, int... i>
WRITESCOPE_INLINE Vec PickLanes(Vec low, Vec high, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(low, high, (2 * i + odd)...);
}

// A tile load takes its lines one after the other: they are brought from the second cache into the
// first while the tile before is multiplied. 14 threads of Emerald Rapids, which read 155 GB/s,
// attend at 144 with it and at 135 without (Qwen3's shape).
WRITESCOPE_INLINE void FetchTile(const std::byte* at, int64_t row_bytes) {
#pragma GCC unroll 16
  for (int i = 0; i < kPanelRows; ++i) __builtin_prefetch(at + i * row_bytes, 0, 3);
}

template <typename Tiles>
class AmxKernel {
 public:
  static constexpr bool kWholeTiles = true;
  static void AttendInF32(const FlatAttentionArgs& args) { Tiles::AttendInF32(args); }

  AmxKernel() { Tiles::Configure(TileConfig()); }
  ~AmxKernel() { Tiles::Release(); }
  AmxKernel(const AmxKernel&) = delete;
  AmxKernel& operator=(const AmxKernel&) = delete;

  // Between the two calls the sums of values in the key are kept here, as the tiles have them:
  // [pair of dims][row], of the even dims and of the odd ones.
  void Begin(const FlatAttentionArgs& args, int first_row, int num_rows) {
    num_panel_rows_ = num_rows;
    if (!args.value_in_key) return;
    for (int dim = 0; dim < args.v_dim; dim += kTileDims) {
      alignas(64) float even[kPanelRows][kTileWords] = {};
      alignas(64) float odd[kPanelRows][kTileWords] = {};
      for (int r = 0; r < num_rows; ++r) {
        const float* from = args.o[first_row + r] + dim;
        for (int p = 0; p < kTileWords; p += kLanes, from += 2 * kLanes) {
          const Vec low = Load(from), high = Load(from + kLanes);
          Store(&even[r][p], PickLanes<0>(low, high, LaneIndices()));
          Store(&odd[r][p], PickLanes<1>(low, high, LaneIndices()));
        }
      }
      TransposeTile(even[0], turned_[dim / kTileWords][0]);
      TransposeTile(odd[0], turned_[dim / kTileWords + 1][0]);
    }
  }
  void End(const FlatAttentionArgs& args, int first_row, int num_rows) {
    if (!args.value_in_key) return;
    for (int dim = 0; dim < args.v_dim; dim += kTileDims) {
      alignas(64) float even[kPanelRows][kTileWords];
      alignas(64) float odd[kPanelRows][kTileWords];
      TransposeTile(turned_[dim / kTileWords][0], even[0]);
      TransposeTile(turned_[dim / kTileWords + 1][0], odd[0]);
      for (int r = 0; r < num_rows; ++r) {
        float* to = args.o[first_row + r] + dim;
        for (int p = 0; p < kTileWords; p += kLanes, to += 2 * kLanes) {
          const Vec even_sum = Load(&even[r][p]), odd_sum = Load(&odd[r][p]);
          Store(to, ZipLow(even_sum, odd_sum, LaneIndices()));
          Store(to + kLanes, ZipHigh(even_sum, odd_sum, LaneIndices()));
        }
      }
    }
  }

  void WholeBlock(const FlatAttentionArgs& args, const WholeRows& rows, QueryTiles q,
                  const KvHeadBlock& block, const KvHeadBlock* next_block) {
    if (args.value_in_key) {
      AttendLatent(args, rows, q, block, next_block);
    } else {
      AttendPlanes(args, rows, q, block, next_block);
    }
  }

 private:
  static constexpr int64_t kTileBytes = int64_t{kPanelRows} * kLineBytes;
  static constexpr int kMaxSums = 32;  // Tiles of output that are stored before they are read

  // Lines are fetched with each tile of K and V that is loaded and with each row's softmax, by the
  // time that each takes.
  void AttendPlanes(const FlatAttentionArgs& args, const WholeRows& rows, QueryTiles q,
                    const KvHeadBlock& block, const KvHeadBlock* next_block) {
    const int64_t k_lines = int64_t{args.k_dim} * 2, v_lines = int64_t{args.v_dim} * 2;
    const int64_t row_lines = (k_lines + v_lines) / 4;
    const int64_t tile_lines = (k_lines + v_lines - row_lines) / 2;
    LinesAhead ahead(block, next_block, k_lines * kLineBytes, v_lines * kLineBytes,
                     PlanesAhead(args.fetch_first), args.fetch_first);
    Score(block.k, args.k_dim, q, ahead, tile_lines);
    Weigh(args, rows, ahead, row_lines);
    AddValues(args, rows, block.v, ahead, tile_lines);
  }

  void AttendLatent(const FlatAttentionArgs& args, const WholeRows& rows, QueryTiles q,
                    const KvHeadBlock& block, const KvHeadBlock* next_block) {
    const int64_t lines = int64_t{args.k_dim} * 2;
    const int64_t row_lines = lines / 4, tile_lines = (lines - row_lines) / 2;
    LinesAhead ahead(block, next_block, lines * kLineBytes, 0, kBlockAhead, false);
    Score(block.k, args.k_dim, q, ahead, tile_lines);
    if (Weigh(args, rows, ahead, row_lines)) RescaleTurned(args.v_dim, rows);
    SpreadWeights();
    if (rows.num_rows < num_panel_rows_) {
      AddLatentForSome(args, rows, block.k, ahead, tile_lines);
    } else {
      AddLatent(args, block.k, ahead, tile_lines);
    }
  }

  // Softmax of all rows; whether any has a new maximum.
  bool Weigh(const FlatAttentionArgs& args, const WholeRows& rows, LinesAhead& ahead,
             int64_t lines) {
    FetchedLines fetched = ahead.Take(lines, rows.num_rows);
    bool is_rescaled = false;
    for (int i = 0; i < rows.num_rows; ++i) {
      const int r = rows.row[i];
      const int row = rows.first_row + r;
      fetched.Step();
      auto* const weights = reinterpret_cast<std::byte*>(weights_[r]);
      factor_[r] = SoftmaxRow(scores_[r], kBlockTokens, args.m[row], args.l[row],
                              [weights](int t, Vec power) { StoreBf16(weights + 2 * t, power); });
      is_rescaled = is_rescaled || factor_[r] != 1.0f;
    }
    return is_rescaled;
  }

  void Score(const std::byte* k, int k_dim, QueryTiles q, LinesAhead& ahead, int64_t lines) {
    if (k_dim <= 4 * kTileDims) {
      ScoreNarrow(k, k_dim, q, ahead, lines);
    } else {
      ScoreWide(k, k_dim, q, ahead, lines);
    }
  }

  // Up to 128 dims: the queries stay in registers and K is read as it lies.
  void ScoreNarrow(const std::byte* k, int k_dim, QueryTiles q, LinesAhead& ahead, int64_t lines) {
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
      Tiles::template Store<4>(&scores_[0][t * kTileTokens], sizeof(scores_[0]));
      Tiles::template Store<5>(&scores_[0][(t + 1) * kTileTokens], sizeof(scores_[0]));
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

  void ScoreWide(const std::byte* k, int k_dim, QueryTiles q, LinesAhead& ahead, int64_t lines) {
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
    Tiles::template Store<0>(&scores_[0][0], sizeof(scores_[0]));
    Tiles::template Store<1>(&scores_[0][16], sizeof(scores_[0]));
    Tiles::template Store<2>(&scores_[0][32], sizeof(scores_[0]));
    Tiles::template Store<3>(&scores_[0][48], sizeof(scores_[0]));
  }

  // Sums of up to 512 dims are stored before the first of them is read: a load that meets a tile's
  // store on its way to the cache waits for it.
  void AddValues(const FlatAttentionArgs& args, const WholeRows& rows, const std::byte* v,
                 LinesAhead& ahead, int64_t lines) {
    const int64_t row_bytes = int64_t{args.v_dim} * 4;
    const int64_t half = kPanelRows * row_bytes;  // From the first 32 tokens to the others
    Tiles::template Load<6>(weights_, sizeof(weights_[0]));
    Tiles::template Load<7>(&weights_[0][kTileWords], sizeof(weights_[0]));
    const int num_tiles = args.v_dim / kTileWords;
    FetchedLines fetched = ahead.Take(lines, 2 * num_tiles);
    for (int first = 0; first < num_tiles; first += kMaxSums) {
      const int count = num_tiles - first < kMaxSums ? num_tiles - first : kMaxSums;
      // A multiple of 32 dims: tiles come in pairs.
      for (int tile = 0; tile < count; tile += 2) {
        const std::byte* at = v + int64_t{first + tile} * kLineBytes;
        if (tile % 4 == 0) {
          AddValueTile<0>(at, row_bytes, half, fetched);
          AddValueTile<1>(at + kLineBytes, row_bytes, half, fetched);
          Tiles::template Store<0>(sums_[tile], kLineBytes);
          Tiles::template Store<1>(sums_[tile + 1], kLineBytes);
        } else {
          AddValueTile<2>(at, row_bytes, half, fetched);
          AddValueTile<3>(at + kLineBytes, row_bytes, half, fetched);
          Tiles::template Store<2>(sums_[tile], kLineBytes);
          Tiles::template Store<3>(sums_[tile + 1], kLineBytes);
        }
      }
      for (int i = 0; i < rows.num_rows; ++i) {
        const int r = rows.row[i];
        float* o = args.o[rows.first_row + r] + first * kTileWords;
        for (int tile = 0; tile < count; ++tile, o += kTileWords) {
          for (int d = 0; d < kTileWords; d += kLanes) {
            Store(o + d, Load(o + d) * factor_[r] + Load(&sums_[tile][r][d]));
          }
        }
      }
    }
  }

  template <int kSum>
  static void AddValueTile(const std::byte* v, int64_t row_bytes, int64_t half,
                           FetchedLines& fetched) {
    FetchTile(v + kLineBytes, row_bytes);  // Of the 16 dims after
    FetchTile(v + half + kLineBytes, row_bytes);
    Tiles::template Zero<kSum>();
    Tiles::template Load<4>(v, row_bytes);
    Tiles::template AddProducts<kSum, 6, 4>();
    Tiles::template Load<5>(v + half, row_bytes);
    Tiles::template AddProducts<kSum, 7, 5>();
    fetched.Step();
    fetched.Step();
  }

  // Weights of 16 tokens as B: word [token][row] holds the weight in its low half for the even
  // dims, in its high half for the odd ones.
  void SpreadWeights() {
    alignas(64) float words[kPanelRows][kTileTokens];
    for (int t = 0; t < kTilesPerBlock; ++t) {
      for (int r = 0; r < kPanelRows; ++r) {
        for (int i = 0; i < kTileTokens; i += kLanes) {
          const auto* halves = reinterpret_cast<const uint16_t*>(weights_[r]) + t * kTileTokens + i;
          Store(&words[r][i], LoadBf16(halves));
        }
      }
      TransposeTile(words[0], odd_weights_[t][0]);
      for (int token = 0; token < kTileTokens; ++token) {
        for (int i = 0; i < kPanelRows; i += kLanes) {
          const auto* odd = reinterpret_cast<const std::byte*>(&odd_weights_[t][token][i]);
          StoreWords(reinterpret_cast<std::byte*>(&even_weights_[t][token][i]),
                     LoadWords(odd) >> 16);
        }
      }
    }
  }

  // Of the rows that see the block whole; the others keep their sums.
  void RescaleTurned(int v_dim, const WholeRows& rows) {
    alignas(64) float factors[kPanelRows];
    for (int r = 0; r < kPanelRows; ++r) factors[r] = 1.0f;
    for (int i = 0; i < rows.num_rows; ++i) factors[rows.row[i]] = factor_[rows.row[i]];
    for (int r = 0; r < kPanelRows; r += kLanes) {
      const Vec factor = Load(factors + r);
      for (int dim = 0; dim < v_dim; ++dim) {
        float* sum = &turned_[0][0][0] + int64_t{dim} * kPanelRows + r;
        Store(sum, Load(sum) * factor);
      }
    }
  }

  void AddLatent(const FlatAttentionArgs& args, const std::byte* k, LinesAhead& ahead,
                 int64_t lines) {
    const int64_t token_step = int64_t{kTileTokens} * args.k_dim * 2;
    const int num_tiles = args.v_dim / kTileDims;
    FetchedLines fetched = ahead.Take(lines, int64_t{num_tiles} * kTilesPerBlock);
    for (int tile = 0; tile < num_tiles; tile += 2) {
      const std::byte* at = k + int64_t{tile} * kTileBytes;
      float(*sums)[kPanelRows][kTileWords] = turned_ + 2 * tile;
      const bool is_pair = tile + 1 < num_tiles;
      Tiles::template Load<0>(sums[0], kLineBytes);
      Tiles::template Load<1>(sums[1], kLineBytes);
      if (is_pair) {
        Tiles::template Load<2>(sums[2], kLineBytes);
        Tiles::template Load<3>(sums[3], kLineBytes);
      }
      for (int t = 0; t < kTilesPerBlock; ++t, at += token_step) {
        Tiles::template Load<4>(at, kLineBytes);
        Tiles::template Load<6>(even_weights_[t], kLineBytes);
        Tiles::template AddProducts<0, 4, 6>();
        Tiles::template Load<7>(odd_weights_[t], kLineBytes);
        Tiles::template AddProducts<1, 4, 7>();
        fetched.Step();
        if (is_pair) {
          Tiles::template Load<5>(at + kTileBytes, kLineBytes);
          Tiles::template AddProducts<2, 5, 6>();
          Tiles::template AddProducts<3, 5, 7>();
          fetched.Step();
        }
      }
      Tiles::template Store<0>(sums[0], kLineBytes);
      Tiles::template Store<1>(sums[1], kLineBytes);
      if (is_pair) {
        Tiles::template Store<2>(sums[2], kLineBytes);
        Tiles::template Store<3>(sums[3], kLineBytes);
      }
    }
  }

  // The sums of rows that do not see the block whole are put aside: no weight hides a NaN.
  void AddLatentForSome(const FlatAttentionArgs& args, const WholeRows& rows, const std::byte* k,
                        LinesAhead& ahead, int64_t lines) {
    bool is_whole[kPanelRows] = {};
    for (int i = 0; i < rows.num_rows; ++i) is_whole[rows.row[i]] = true;
    float kept[kPanelRows][kMaxKeyDim];
    float* const sums = &turned_[0][0][0];
    for (int r = 0; r < kPanelRows; ++r) {
      for (int dim = 0; dim < args.v_dim && !is_whole[r]; ++dim) {
        kept[r][dim] = sums[dim * kPanelRows + r];
      }
    }
    AddLatent(args, k, ahead, lines);
    for (int r = 0; r < kPanelRows; ++r) {
      for (int dim = 0; dim < args.v_dim && !is_whole[r]; ++dim) {
        sums[dim * kPanelRows + r] = kept[r][dim];
      }
    }
  }

  // Rows that do not see the block whole keep what an earlier block left here: no row of a product
  // depends on another one.
  alignas(64) float scores_[kPanelRows][kBlockTokens] = {};
  alignas(64) uint32_t weights_[kPanelRows][kBlockTokens / 2] = {};  // As A: pairs of tokens
  alignas(64) float factor_[kPanelRows] = {};
  alignas(64) float sums_[kMaxSums][kPanelRows][kTileWords];
  int num_panel_rows_ = 0;
  alignas(64) float turned_[kMaxKeyDim / kTileWords][kPanelRows][kTileWords];
  alignas(64) float even_weights_[kTilesPerBlock][kTileTokens][kPanelRows];
  alignas(64) float odd_weights_[kTilesPerBlock][kTileTokens][kPanelRows];
};

}  // namespace
}  // namespace writescope::kernels
