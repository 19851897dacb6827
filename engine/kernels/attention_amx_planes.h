// Attention of a panel of 16 rows to a whole block whose values have a plane of their own, on the
// tile registers of AMX. Included by the files of one instruction set only; see simd_vec.h.
//
// Weights are A [16 rows][32 tokens], 16 pair rows of V are B as they lie.
#pragma once

#include "engine/kernels/attention_amx_scores.h"

namespace writescope::kernels {
namespace {

template <typename Tiles>
class AmxPlanes : public AmxScores<Tiles> {
  using Scores = AmxScores<Tiles>;

 public:
  // From the block that is attended to to the one that is fetched: 32 KiB each at 128 dims.
  static constexpr int kAhead = 2;

  explicit AmxPlanes(int num_rows) : Scores(num_rows) {}

  // The sums stay where the caller has them.
  void Begin(const FlatAttentionArgs&, int, int) {}
  void End(const FlatAttentionArgs&, int, int) {}
  void Resume(const FlatAttentionArgs&, int) {}
  void Suspend(const FlatAttentionArgs&) {}

  // Lines are fetched with each tile of K and V that is loaded and with each row's softmax, by the
  // time that each takes.
  void WholeBlock(const FlatAttentionArgs& args, const WholeRows& rows, QueryTiles q,
                  const KvHeadBlock& block, const KvHeadBlock* next_block) {
    const int64_t k_lines = int64_t{args.k_dim} * 2, v_lines = int64_t{args.v_dim} * 2;
    const int64_t row_lines = (k_lines + v_lines) / 4;
    const int64_t tile_lines = (k_lines + v_lines - row_lines) / 2;
    LinesAhead ahead(block, next_block, k_lines * kLineBytes, v_lines * kLineBytes, kBlockAhead,
                     false);
    this->Score(block.k, args.k_dim, q, {scores_[0], kTileTokens, kBlockTokens}, ahead, tile_lines);
    Weigh(args, rows, ahead, row_lines);
    AddValues(args, rows, block.v, ahead, tile_lines);
  }

 private:
  static constexpr int kMaxSums = 32;  // Tiles of output that are stored before they are read

  void Weigh(const FlatAttentionArgs& args, const WholeRows& rows, LinesAhead& ahead,
             int64_t lines) {
    FetchedLines fetched = ahead.Take(lines, rows.num_rows);
    for (int i = 0; i < rows.num_rows; ++i) {
      const int r = rows.row[i];
      const int row = rows.first_row + r;
      fetched.Step();
      auto* const weights = reinterpret_cast<std::byte*>(weights_[r]);
      factor_[r] = SoftmaxRow(scores_[r], kBlockTokens, args.m[row], args.l[row],
                              [weights](int t, Vec power) { StoreBf16(weights + 2 * t, power); });
    }
  }

  // Sums of up to 512 dims are stored before the first of them is read: a load that meets a tile's
  // store on its way to the cache waits for it.
  void AddValues(const FlatAttentionArgs& args, const WholeRows& rows, const std::byte* v,
                 LinesAhead& ahead, int64_t lines) {
    const int64_t row_bytes = int64_t{args.v_dim} * 4;
    const int64_t half = kPanelRows * row_bytes;  // From the first 32 tokens to the others
    Tiles::template Load<3>(weights_, sizeof(weights_[0]));
    Tiles::template Load<4>(&weights_[0][kTileWords], sizeof(weights_[0]));
    const int num_tiles = args.v_dim / kTileWords;
    FetchedLines fetched = ahead.Take(lines, 2 * num_tiles);
    for (int first = 0; first < num_tiles; first += kMaxSums) {
      const int count = num_tiles - first < kMaxSums ? num_tiles - first : kMaxSums;
      // A multiple of 32 dims: tiles come in pairs.
      for (int tile = 0; tile < count; tile += 2) {
        const std::byte* at = v + int64_t{first + tile} * kLineBytes;
        AddValueTile<0>(at, row_bytes, half, fetched);
        Tiles::template Store<0>(sums_[tile], kLineBytes);
        AddValueTile<1>(at + kLineBytes, row_bytes, half, fetched);
        Tiles::template Store<1>(sums_[tile + 1], kLineBytes);
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

  // 16 dims of all tokens. A line of V holds those of one pair of tokens.
  template <int kSum>
  static void AddValueTile(const std::byte* v, int64_t row_bytes, int64_t half,
                           FetchedLines& fetched) {
    Tiles::template Zero<kSum>();
    Tiles::template Load<2>(v, row_bytes);
    FetchTile(v + 2 * kLineBytes, row_bytes);
    Tiles::template AddProducts<kSum, 3, 2>();
    fetched.Step();
    Tiles::template Load<2>(v + half, row_bytes);
    FetchTile(v + 2 * kLineBytes + half, row_bytes);
    Tiles::template AddProducts<kSum, 4, 2>();
    fetched.Step();
  }

  // Rows that do not see the block whole keep what an earlier block left here: no row of a product
  // depends on another one.
  alignas(64) float scores_[kPanelRows][kBlockTokens] = {};
  alignas(64) uint32_t weights_[kPanelRows][kBlockTokens / 2] = {};  // As A: pairs of tokens
  float factor_[kPanelRows] = {};
  alignas(64) float sums_[kMaxSums][kPanelRows][kTileWords];
};

}  // namespace
}  // namespace writescope::kernels
