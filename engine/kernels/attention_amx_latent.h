// Attention of a panel of 16 rows to a whole block of latents, which are key and value, on the tile
// registers of AMX. Included by the files of one instruction set only; see simd_vec.h.
//
// For its values a latent tile cannot be B again, since now tokens are summed over. Two tiles of
// the same dims, whose words are pairs of dims of one token, become two of A, whose words are one
// dim of two tokens: a shift and a blend a line, and nothing crosses lanes. The weights of these
// tokens are B. Sums come out as [dim][row]; they stay so over all blocks of a call, and over all
// calls for the same rows where the caller has memory for them, and are transposed at the end.
#pragma once

#include "engine/kernels/attention_amx_scores.h"

namespace writescope::kernels {
namespace {

// 16 x 16 words, rows and columns exchanged: load(index) gives kLanes of them, store(index, words)
// gets as many at a time, at their place in the result.
template <typename LoadAt, typename StoreAt>
WRITESCOPE_INLINE void TransposeTileBy(const LoadAt& load, const StoreAt& store) {
  for (int row = 0; row < kPanelRows; row += kLanes) {
    for (int column = 0; column < kTileWords; column += kLanes) {
      WordVec rows[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) rows[i] = load((row + i) * kTileWords + column);
      Transpose(rows);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store((column + i) * kTileWords + row, rows[i]);
    }
  }
}
WRITESCOPE_INLINE void TransposeTile(const float* from, float* to) {
  TransposeTileBy(
      [from](int index) { return LoadWords(reinterpret_cast<const std::byte*>(from + index)); },
      [to](int index, WordVec words) {
        StoreWords(reinterpret_cast<std::byte*>(to + index), words);
      });
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

template <typename Tiles>
class AmxLatent : public AmxScores<Tiles> {
  using Scores = AmxScores<Tiles>;
  using Sums = float (*)[kPanelRows][kTileWords];

 public:
  static constexpr int kAhead = 1;  // Blocks from the one that is attended to to what is fetched

  // A row of a panel is a column of its sums: what products cost does not depend on how many it
  // has.
  explicit AmxLatent(int) : Scores(kPanelRows) {}

  // From here to End the sums are as the tiles have them: [pair of dims][row], of the even dims and
  // of the odd ones.
  void Begin(const FlatAttentionArgs& args, int first_row, int num_rows) {
    Resume(args, num_rows);
    bool is_empty = true;
    for (int r = 0; r < num_rows; ++r) is_empty = is_empty && args.l[first_row + r][0] == 0;
    if (is_empty) {
      float* const sums = turned_[0][0];
      for (int i = 0; i < args.v_dim * kPanelRows; i += kLanes) Store(sums + i, Vec{});
      return;
    }
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
  // Instead of Begin and End, where the caller keeps the sums between two calls.
  void Resume(const FlatAttentionArgs& args, int num_rows) {
    num_panel_rows_ = num_rows;
    turned_ =
        args.kept.memory != nullptr ? reinterpret_cast<Sums>(args.kept.memory + kQueryBytes) : own_;
  }
  void Suspend(const FlatAttentionArgs&) {}

  void WholeBlock(const FlatAttentionArgs& args, const WholeRows& rows, QueryTiles q,
                  const KvHeadBlock& block, const KvHeadBlock* next_block) {
    const int64_t lines = int64_t{args.k_dim} * 2;
    LinesAhead ahead(block, next_block, lines * kLineBytes, 0, kBlockAhead, false);
    ScoreLatent(block.k, args.k_dim, q, ahead, lines * 5 / 16);
    if (Weigh(args, rows, ahead, lines * 5 / 36)) RescaleTurned(args.v_dim, rows);
    PairWeights();
    if (rows.num_rows < num_panel_rows_) {
      AddLatentForSome(args, rows, block.k, ahead);
    } else {
      AddLatent(args, block.k, ahead);
    }
  }

 private:
  using Scores::kTileBytes;
  static constexpr int kPairsPerBlock = kTilesPerBlock / 2;
  static constexpr int kFetchesAPair = 2;
  // By so much a score may be above a row's m before the row's sums are brought to a new one, which
  // takes as long as an eighth of a block: with a maximum that follows every score some row of a
  // panel has a new one in nearly every block of a short sequence. Weights up to 2^8 are rounded as
  // those up to 1.
  static constexpr float kSlack = 8.0f;

  // All 64 tokens at once, so that each query tile is loaded once: four sums, and K and the queries
  // take turns in one register each.
  void ScoreLatent(const std::byte* k, int k_dim, QueryTiles q, LinesAhead& ahead, int64_t lines) {
    const int num_tiles = k_dim / kTileDims;
    const int64_t token_step = num_tiles * kTileBytes;
    FetchedLines fetched = ahead.Take(lines, int64_t{kTilesPerBlock} * num_tiles);
    Tiles::template Zero<0>();
    Tiles::template Zero<1>();
    Tiles::template Zero<2>();
    Tiles::template Zero<3>();
    for (int tile = 0; tile < num_tiles; ++tile, k += kTileBytes) {
      Tiles::template Load<5>(q[tile], kLineBytes);
      ScoreTile<0>(k, fetched);
      ScoreTile<1>(k + token_step, fetched);
      ScoreTile<2>(k + 2 * token_step, fetched);
      ScoreTile<3>(k + 3 * token_step, fetched);
    }
    Tiles::template Store<0>(scores_[0], kLineBytes);
    Tiles::template Store<1>(scores_[1], kLineBytes);
    Tiles::template Store<2>(scores_[2], kLineBytes);
    Tiles::template Store<3>(scores_[3], kLineBytes);
  }
  template <int kSum>
  static void ScoreTile(const std::byte* k, FetchedLines& fetched) {
    Tiles::template Load<4>(k, kLineBytes);
    FetchTile(k + kTileBytes, kLineBytes);
    Tiles::template AddProducts<kSum, 5, 4>();
    fetched.Step();
  }

  // Softmax of all rows, where the scores are; whether any has a new maximum.
  bool Weigh(const FlatAttentionArgs& args, const WholeRows& rows, LinesAhead& ahead,
             int64_t lines) {
    FetchedLines fetched = ahead.Take(lines, rows.num_rows);
    bool is_rescaled = false;
    for (int i = 0; i < rows.num_rows; ++i) {
      const int r = rows.row[i];
      const int row = rows.first_row + r;
      fetched.Step();
      const bool is_first = args.l[row][0] == 0;  // There are no sums yet.
      const auto at = [this, r](int token) {
        return &scores_[token / kTileTokens][r][token % kTileTokens];
      };
      factor_[r] = SoftmaxRowAt(at, kBlockTokens, kSlack, args.m[row], args.l[row],
                                [at](int t, Vec power) { Store(at(t), power); });
      is_rescaled = is_rescaled || (factor_[r] != 1.0f && !is_first);
    }
    return is_rescaled;
  }

  // Weights of two times 16 tokens as B: word [token][row] holds the weight of the token of the
  // first tile in its low half, of the one of the second in its high half.
  void PairWeights() {
    for (int pair = 0; pair < kPairsPerBlock; ++pair) {
      const float* const low = scores_[2 * pair][0];
      const float* const high = scores_[2 * pair + 1][0];
      auto* const to = reinterpret_cast<std::byte*>(weights_[pair]);
      TransposeTileBy(
          [low, high](int index) {
            return WidenedBf16(Load(low + index)) | (WidenedBf16(Load(high + index)) << 16);
          },
          [to](int index, WordVec words) { StoreWords(to + 4 * index, words); });
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
        float* sum = turned_[0][0] + int64_t{dim} * kPanelRows + r;
        Store(sum, Load(sum) * factor);
      }
    }
  }

  // Two latent tiles of the same dims, one of which lies at `first`, as two of A: of the even dims
  // and of the odd ones. What is left of the lines is fetched on the way, a few at a time: a burst
  // of them holds up the loads that follow.
  void PairTokens(const std::byte* first, int64_t token_step, std::byte (&values)[2][kTileBytes],
                  FetchedLines& fetched) {
#pragma GCC unroll 4
    for (int part = 0; part < kFetchesAPair; ++part) {
      constexpr int64_t kPartBytes = kTileBytes / kFetchesAPair;
#pragma GCC unroll 16
      for (int64_t at = part * kPartBytes; at < (part + 1) * kPartBytes; at += kVectorBytes) {
        const WordVec low = LoadWords(first + at), high = LoadWords(first + token_step + at);
        StoreWords(values[0] + at, (low & 0xffffu) | (high << 16));
        StoreWords(values[1] + at, (low >> 16) | (high & 0xffff0000u));
      }
      fetched.Step();
    }
  }

  // The values of a pair make room for those of the 32 dims after as soon as they are in registers;
  // so a tile is loaded long after it was stored.
  void AddLatent(const FlatAttentionArgs& args, const std::byte* k, LinesAhead& ahead) {
    const int64_t token_step = int64_t{kTileTokens} * args.k_dim * 2;
    const int num_tiles = args.v_dim / kTileDims;
    FetchedLines fetched =
        ahead.Take(int64_t{args.k_dim} * 2, int64_t{kFetchesAPair} * kPairsPerBlock * num_tiles);
    Tiles::template Load<4>(weights_[0], kLineBytes);
    Tiles::template Load<5>(weights_[1], kLineBytes);
    PairTokens(k, token_step, values_[0], fetched);
    PairTokens(k + 2 * token_step, token_step, values_[1], fetched);
    for (int tile = 0; tile < num_tiles; ++tile) {
      const Sums sums = turned_ + 2 * tile;
      const std::byte* const next = k + (tile + 1) * kTileBytes;
      const bool is_last = tile + 1 == num_tiles;
      Tiles::template Load<0>(sums[0], kLineBytes);
      Tiles::template Load<1>(sums[1], kLineBytes);
      Tiles::template Load<2>(values_[0][0], kLineBytes);
      Tiles::template AddProducts<0, 2, 4>();
      Tiles::template Load<3>(values_[0][1], kLineBytes);
      Tiles::template AddProducts<1, 3, 4>();
      if (!is_last) PairTokens(next, token_step, values_[0], fetched);
      Tiles::template Load<2>(values_[1][0], kLineBytes);
      Tiles::template AddProducts<0, 2, 5>();
      Tiles::template Load<3>(values_[1][1], kLineBytes);
      Tiles::template AddProducts<1, 3, 5>();
      if (!is_last) PairTokens(next + 2 * token_step, token_step, values_[1], fetched);
      Tiles::template Store<0>(sums[0], kLineBytes);
      Tiles::template Store<1>(sums[1], kLineBytes);
    }
  }

  // The sums of rows that do not see the block whole are put aside: no weight hides a NaN.
  void AddLatentForSome(const FlatAttentionArgs& args, const WholeRows& rows, const std::byte* k,
                        LinesAhead& ahead) {
    bool is_whole[kPanelRows] = {};
    for (int i = 0; i < rows.num_rows; ++i) is_whole[rows.row[i]] = true;
    float kept[kPanelRows][kMaxKeyDim];
    float* const sums = turned_[0][0];
    for (int r = 0; r < kPanelRows; ++r) {
      for (int dim = 0; dim < args.v_dim && !is_whole[r]; ++dim) {
        kept[r][dim] = sums[dim * kPanelRows + r];
      }
    }
    AddLatent(args, k, ahead);
    for (int r = 0; r < kPanelRows; ++r) {
      for (int dim = 0; dim < args.v_dim && !is_whole[r]; ++dim) {
        sums[dim * kPanelRows + r] = kept[r][dim];
      }
    }
  }

  // [tile][row][token]; of rows that do not see the block whole only the sums are put aside.
  alignas(64) float scores_[kTilesPerBlock][kPanelRows][kTileTokens] = {};
  float factor_[kPanelRows] = {};
  static_assert(kQueryBytes + sizeof(float) * kMaxKeyDim * kPanelRows <= KeptState::kBytes);
  Sums turned_ = nullptr;
  int num_panel_rows_ = 0;
  alignas(64) uint32_t weights_[kPairsPerBlock][kTileTokens][kPanelRows];
  alignas(64) std::byte values_[kPairsPerBlock][2][kTileBytes];
  alignas(64) float own_[kMaxKeyDim / kTileWords][kPanelRows][kTileWords];
};

}  // namespace
}  // namespace writescope::kernels
