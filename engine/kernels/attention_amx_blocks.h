// Attention of a panel of 16 rows to a whole block on the tile registers of AMX. Included by the
// files of one instruction set only; see simd_vec.h.
//
// Scores: the panel's queries are A, a K tile is B as it lies: 16 pairs of dims x 16 tokens.
// Values of a plane of their own: weights are A [16 rows][32 tokens], 16 pair rows of V are B.
// Values in the key: the latent tile cannot be B again, since now tokens are summed over. It is A,
// 16 pairs of dims x 16 tokens, and the weights are B, with zeros between: {w, 0} meets the even
// dim of each pair, {0, w} the odd one. Half of the multiplications are by zero, which costs less
// than a transpose of the latent: the tile unit is far from busy when the keys come from memory.
// Sums come out as [dim][row] and are transposed instead: they are 16 rows, not 64 tokens.
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

template <typename Tiles>
class AmxKernel {
 public:
  static void AttendInF32(const FlatAttentionArgs& args) { Tiles::AttendInF32(args); }

  AmxKernel() { Tiles::Configure(TileConfig()); }
  ~AmxKernel() { Tiles::Release(); }
  AmxKernel(const AmxKernel&) = delete;
  AmxKernel& operator=(const AmxKernel&) = delete;

  void WholeBlock(const FlatAttentionArgs& args, const WholeRows& rows, const QueryTiles& q,
                  const KvHeadBlock& block, const KvHeadBlock* next_block) {
    // Lines are fetched with each tile that is loaded, over both halves of the work.
    NextLines next(args, next_block,
                   int64_t{kTilesPerBlock} * (args.k_dim + args.v_dim) / kTileDims);
    Score(block.k, args.k_dim, q, next);
    for (int i = 0; i < rows.num_rows; ++i) {
      const int r = rows.row[i];
      const int row = rows.first_row + r;
      factor_[r] = SoftmaxRow(scores_[r], kBlockTokens, args.m[row], args.l[row]);
      for (int t = 0; t < kBlockTokens; t += kLanes) {
        StoreBf16(reinterpret_cast<std::byte*>(weights_[r]) + 2 * t, Load(scores_[r] + t));
      }
    }
    if (args.value_in_key) {
      SpreadWeights();
      AddLatent(args, rows, block.k, next);
    } else {
      AddValues(args, rows, block.v, next);
    }
  }

 private:
  static constexpr int64_t kTileBytes = int64_t{kPanelRows} * kLineBytes;
  static constexpr int kMaxSums = 32;  // Tiles of output that are stored before they are read

  void Score(const std::byte* k, int k_dim, const QueryTiles& q, NextLines& next) {
    const int64_t token_step = int64_t{kTileTokens} * k_dim * 2;
    Tiles::template Zero<0>();
    Tiles::template Zero<1>();
    Tiles::template Zero<2>();
    Tiles::template Zero<3>();
    for (int64_t tile = 0; tile < k_dim / kTileDims; ++tile) {
      const std::byte* k_tile = k + tile * kTileBytes;
      Tiles::template Load<4>(q.words[tile], kLineBytes);
      Tiles::template Load<5>(k_tile, kLineBytes);
      Tiles::template AddProducts<0, 4, 5>();
      next.Fetch();
      Tiles::template Load<6>(k_tile + token_step, kLineBytes);
      Tiles::template AddProducts<1, 4, 6>();
      next.Fetch();
      Tiles::template Load<7>(k_tile + 2 * token_step, kLineBytes);
      Tiles::template AddProducts<2, 4, 7>();
      next.Fetch();
      Tiles::template Load<5>(k_tile + 3 * token_step, kLineBytes);
      Tiles::template AddProducts<3, 4, 5>();
      next.Fetch();
    }
    Tiles::template Store<0>(&scores_[0][0], sizeof(scores_[0]));
    Tiles::template Store<1>(&scores_[0][16], sizeof(scores_[0]));
    Tiles::template Store<2>(&scores_[0][32], sizeof(scores_[0]));
    Tiles::template Store<3>(&scores_[0][48], sizeof(scores_[0]));
  }

  // Sums of up to 512 dims are stored before the first of them is read: a load that meets a tile's
  // store on its way to the cache waits for it.
  void AddValues(const FlatAttentionArgs& args, const WholeRows& rows, const std::byte* v,
                 NextLines& next) {
    const int64_t row_bytes = int64_t{args.v_dim} * 4;
    const int64_t half = kPanelRows * row_bytes;  // From the first 32 tokens to the others
    Tiles::template Load<6>(weights_, sizeof(weights_[0]));
    Tiles::template Load<7>(&weights_[0][kTileWords], sizeof(weights_[0]));
    const int num_tiles = args.v_dim / kTileWords;
    for (int first = 0; first < num_tiles; first += kMaxSums) {
      const int count = num_tiles - first < kMaxSums ? num_tiles - first : kMaxSums;
      // A multiple of 32 dims: tiles come in pairs.
      for (int tile = 0; tile < count; tile += 2) {
        const std::byte* at = v + int64_t{first + tile} * kLineBytes;
        if (tile % 4 == 0) {
          AddValueTile<0>(at, row_bytes, half, next);
          AddValueTile<1>(at + kLineBytes, row_bytes, half, next);
          Tiles::template Store<0>(sums_[tile], kLineBytes);
          Tiles::template Store<1>(sums_[tile + 1], kLineBytes);
        } else {
          AddValueTile<2>(at, row_bytes, half, next);
          AddValueTile<3>(at + kLineBytes, row_bytes, half, next);
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
  static void AddValueTile(const std::byte* v, int64_t row_bytes, int64_t half, NextLines& next) {
    Tiles::template Zero<kSum>();
    Tiles::template Load<4>(v, row_bytes);
    Tiles::template AddProducts<kSum, 6, 4>();
    Tiles::template Load<5>(v + half, row_bytes);
    Tiles::template AddProducts<kSum, 7, 5>();
    next.Fetch();
    next.Fetch();
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

  void AddLatent(const FlatAttentionArgs& args, const WholeRows& rows, const std::byte* k,
                 NextLines& next) {
    const int64_t token_step = int64_t{kTileTokens} * args.k_dim * 2;
    const int num_tiles = args.v_dim / kTileDims;
    for (int first = 0; first < num_tiles; first += kMaxSums / 2) {
      const int count = num_tiles - first < kMaxSums / 2 ? num_tiles - first : kMaxSums / 2;
      for (int tile = 0; tile < count; tile += 2) {
        const std::byte* at = k + int64_t{first + tile} * kTileBytes;
        const bool is_pair = tile + 1 < count;
        Tiles::template Zero<0>();
        Tiles::template Zero<1>();
        Tiles::template Zero<2>();
        Tiles::template Zero<3>();
        for (int t = 0; t < kTilesPerBlock; ++t) {
          Tiles::template Load<4>(at + t * token_step, kLineBytes);
          Tiles::template Load<6>(even_weights_[t], kLineBytes);
          Tiles::template AddProducts<0, 4, 6>();
          Tiles::template Load<7>(odd_weights_[t], kLineBytes);
          Tiles::template AddProducts<1, 4, 7>();
          next.Fetch();
          if (is_pair) {
            Tiles::template Load<5>(at + kTileBytes + t * token_step, kLineBytes);
            Tiles::template AddProducts<2, 5, 6>();
            Tiles::template AddProducts<3, 5, 7>();
            next.Fetch();
          }
        }
        Tiles::template Store<0>(sums_[2 * tile], kLineBytes);
        Tiles::template Store<1>(sums_[2 * tile + 1], kLineBytes);
        if (is_pair) {
          Tiles::template Store<2>(sums_[2 * tile + 2], kLineBytes);
          Tiles::template Store<3>(sums_[2 * tile + 3], kLineBytes);
        }
      }
      for (int tile = 0; tile < count; ++tile) {
        AddTurned(args, rows, sums_[2 * tile], sums_[2 * tile + 1], (first + tile) * kTileDims);
      }
    }
  }

  // 32 output dims from sums of even and of odd ones, [dim / 2][row] each.
  void AddTurned(const FlatAttentionArgs& args, const WholeRows& rows,
                 const float (*even_sums)[kTileWords], const float (*odd_sums)[kTileWords],
                 int dim) {
    alignas(64) float even[kPanelRows][kTileWords];
    alignas(64) float odd[kPanelRows][kTileWords];
    TransposeTile(even_sums[0], even[0]);
    TransposeTile(odd_sums[0], odd[0]);
    for (int i = 0; i < rows.num_rows; ++i) {
      const int r = rows.row[i];
      float* to = args.o[rows.first_row + r] + dim;
      for (int p = 0; p < kTileWords; p += kLanes, to += 2 * kLanes) {
        const Vec even_sum = Load(&even[r][p]);
        const Vec odd_sum = Load(&odd[r][p]);
        Store(to, Load(to) * factor_[r] + ZipLow(even_sum, odd_sum, LaneIndices()));
        Store(to + kLanes,
              Load(to + kLanes) * factor_[r] + ZipHigh(even_sum, odd_sum, LaneIndices()));
      }
    }
  }

  // Rows that do not see the block whole keep what an earlier block left here: no row of a product
  // depends on another one.
  alignas(64) float scores_[kPanelRows][kBlockTokens] = {};
  alignas(64) uint32_t weights_[kPanelRows][kBlockTokens / 2] = {};  // As A: pairs of tokens
  alignas(64) float factor_[kPanelRows] = {};
  alignas(64) float sums_[kMaxSums][kPanelRows][kTileWords];
  alignas(64) float even_weights_[kTilesPerBlock][kTileTokens][kPanelRows];
  alignas(64) float odd_weights_[kTilesPerBlock][kTileTokens][kPanelRows];
};

}  // namespace
}  // namespace writescope::kernels
