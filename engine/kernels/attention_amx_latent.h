// Attention of a panel of 16 rows to a whole block of latents, which are key and value, on the tile
// registers of AMX. Included by the files of one instruction set only; see simd_vec.h.
//
// For its values a latent tile cannot be B again, since now tokens are summed over. It is A, 16
// pairs of dims x 16 tokens, and the weights are B, with zeros between: {w, 0} meets the even dim
// of each pair, {0, w} the odd one. Half of the multiplications are by zero, which costs less than
// a transpose of the latent: the tile unit is far from busy when the keys come from memory. Sums
// come out as [dim][row]; they stay so over all blocks of a call, and over all calls for the same
// rows where the caller has memory for them, and are transposed at the end.
#pragma once

#include "engine/kernels/attention_amx_scores.h"

namespace writescope::kernels {
namespace {

// 16 x 16 words, rows and columns exchanged: store(index, words) gets kLanes of them at a time, at
// their place in the result.
template <typename StoreAt>
WRITESCOPE_INLINE void TransposeTile(const float* from, const StoreAt& store) {
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
      for (int i = 0; i < kLanes; ++i) store((column + i) * kTileWords + row, rows[i]);
    }
  }
}
WRITESCOPE_INLINE void TransposeTile(const float* from, float* to) {
  TransposeTile(from, [to](int index, WordVec words) {
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
    constexpr int kTileValues = kPanelRows * kTileTokens;
    this->Score(block.k, args.k_dim, q, {scores_[0][0], kTileValues, kTileTokens}, ahead,
                lines * 5 / 16);
    if (Weigh(args, rows, ahead, lines * 5 / 36)) RescaleTurned(args.v_dim, rows);
    SpreadWeights();
    if (rows.num_rows < num_panel_rows_) {
      AddLatentForSome(args, rows, block.k, ahead);
    } else {
      AddLatent(args, block.k, ahead);
    }
  }

 private:
  using Scores::kTileBytes;

  // Softmax of all rows, where the scores are; whether any has a new maximum.
  bool Weigh(const FlatAttentionArgs& args, const WholeRows& rows, LinesAhead& ahead,
             int64_t lines) {
    FetchedLines fetched = ahead.Take(lines, rows.num_rows);
    bool is_rescaled = false;
    for (int i = 0; i < rows.num_rows; ++i) {
      const int r = rows.row[i];
      const int row = rows.first_row + r;
      fetched.Step();
      const auto at = [this, r](int token) {
        return &scores_[token / kTileTokens][r][token % kTileTokens];
      };
      factor_[r] = SoftmaxRowAt(at, kBlockTokens, args.m[row], args.l[row],
                                [at](int t, Vec power) { Store(at(t), power); });
      is_rescaled = is_rescaled || factor_[r] != 1.0f;
    }
    return is_rescaled;
  }

  // Weights of 16 tokens as B: word [token][row] holds the weight in its low half for the even
  // dims, in its high half for the odd ones.
  void SpreadWeights() {
    for (int t = 0; t < kTilesPerBlock; ++t) {
      auto* const even = reinterpret_cast<std::byte*>(even_weights_[t]);
      auto* const odd = reinterpret_cast<std::byte*>(odd_weights_[t]);
      TransposeTile(scores_[t][0], [even, odd](int index, WordVec words) {
        const WordVec rounded = WidenedBf16(reinterpret_cast<Vec>(words));
        StoreWords(even + 4 * index, rounded);
        StoreWords(odd + 4 * index, rounded << 16);
      });
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

  // What is left of the lines is fetched a few at a time between the products, all the way: a burst
  // of them holds up the loads that follow, and then there is none to come when the memory is free.
  void AddLatent(const FlatAttentionArgs& args, const std::byte* k, LinesAhead& ahead) {
    const int64_t token_step = int64_t{kTileTokens} * args.k_dim * 2;
    const int num_tiles = args.v_dim / kTileDims;
    constexpr int kStepsATile = 2;
    FetchedLines fetched =
        ahead.Take(int64_t{args.k_dim} * 2, int64_t{kStepsATile} * kTilesPerBlock * num_tiles);
    Tiles::template Load<4>(k, kLineBytes);
    if (num_tiles > 1) Tiles::template Load<5>(k + kTileBytes, kLineBytes);
    Tiles::template Load<6>(even_weights_[0], kLineBytes);
    Tiles::template Load<7>(odd_weights_[0], kLineBytes);
    for (int tile = 0; tile < num_tiles; tile += 2) {
      const Sums sums = turned_ + 2 * tile;
      const bool is_pair = tile + 1 < num_tiles;
      Tiles::template Load<0>(sums[0], kLineBytes);
      Tiles::template Load<1>(sums[1], kLineBytes);
      if (is_pair) {
        Tiles::template Load<2>(sums[2], kLineBytes);
        Tiles::template Load<3>(sums[3], kLineBytes);
      }
      const std::byte* const dims = k + tile * kTileBytes;
      const std::byte* const next_dims = dims + 2 * kTileBytes;
      for (int t = 0; t < kTilesPerBlock; ++t) {
        // The 16 tokens after, and after the last ones the first of the next dims
        const bool is_last = t + 1 == kTilesPerBlock;
        const int next_t = is_last ? 0 : t + 1, next_tile = is_last ? tile + 2 : tile;
        const std::byte* const next = is_last ? next_dims : dims + next_t * token_step;
        const std::byte* const later =
            is_last ? next_dims + token_step
                    : (t + 2 < kTilesPerBlock ? next + token_step : next_dims);
        FetchTile(later, kLineBytes);
        Tiles::template AddProducts<0, 4, 6>();
        fetched.Step();
        if (is_pair) Tiles::template AddProducts<2, 5, 6>();
        if (next_tile < num_tiles) Tiles::template Load<6>(even_weights_[next_t], kLineBytes);
        fetched.Step();
        FetchTile(later + kTileBytes, kLineBytes);
        Tiles::template AddProducts<1, 4, 7>();
        if (next_tile < num_tiles) Tiles::template Load<4>(next, kLineBytes);
        fetched.Step();
        if (is_pair) Tiles::template AddProducts<3, 5, 7>();
        if (next_tile < num_tiles) Tiles::template Load<7>(odd_weights_[next_t], kLineBytes);
        if (next_tile + 1 < num_tiles) Tiles::template Load<5>(next + kTileBytes, kLineBytes);
        fetched.Step();
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
  alignas(64) float even_weights_[kTilesPerBlock][kTileTokens][kPanelRows];
  alignas(64) float odd_weights_[kTilesPerBlock][kTileTokens][kPanelRows];
  alignas(64) float own_[kMaxKeyDim / kTileWords][kPanelRows][kTileWords];
};

}  // namespace
}  // namespace writescope::kernels
