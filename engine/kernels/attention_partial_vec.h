// The vector implementation of attention_partial.h, one source for every instruction set. Included
// by attention_partial_{generic,avx2,avx512}.cc only; see simd_vec.h.
//
// One pass over the blocks, rows in groups, so that a converted word of K or V serves a group from
// registers. Lanes are tokens for scores and dims for values: a word row of a tile
// is used as it lies and nothing is summed across lanes but the softmax. Products are f32. Rounding
// queries and probabilities to bf16 (vdpbf16ps) would halve the work and cost 8 bits of accuracy.
//
// Every row's arithmetic is in the same order whatever the group it is in, so how a caller cuts
// rows into calls changes no bit of the result.
#pragma once

#include "engine/kernels/attention_partial_flat.h"
#include "engine/kernels/attention_rows_vec.h"
#include "engine/kernels/lines_ahead.h"
#include "engine/kernels/simd_vec.h"

namespace writescope::kernels {
namespace {

// Rows of a group, and vectors of scores or of output dims that it holds: 8 x 2 accumulators fill
// half of the 32 registers of AVX-512, 4 x 2 half of the 16 of the others.
constexpr int kVecRows = kVectorBytes == 64 ? 8 : 4;
constexpr int kGroupVecs = 2;
constexpr int kWordRowBytes = 64;  // 16 words: one word of each token of a tile.
constexpr int kVecsPerWordRow = kWordRowBytes / kVectorBytes;
constexpr int kBlockVecs = kBlockTokens / kLanes;
// With value_in_key: output dims that are transposed at a time (16 KiB), and rows that share them.
constexpr int kValueDims = 64;
constexpr int kPanelRows = 32;

struct Bf16Words {
  static constexpr int kValues = 2;
};
struct F32Words {
  static constexpr int kValues = 1;
};

// Scores of kRows rows against kVecs vectors of tokens: scores[row][token]. `k` is at the first
// word row; vector v begins v tiles further where a vector is a whole word row, else v vectors
// further.
template <typename Words, int kRows, int kVecs>
inline void ScoreVecs(const std::byte* k, int64_t tile_bytes, int num_word_rows,
                      const float* const* q_rows, float (*scores)[kBlockTokens], int64_t score_step,
                      FetchedLines fetched) {
  const float* q[kRows];
  Vec sum[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    q[r] = q_rows[r];
    for (int v = 0; v < kVecs; ++v) sum[r][v] = Vec{};
  }
  for (int64_t p = 0; p < num_word_rows; ++p) {
    const std::byte* word_row = k + p * kWordRowBytes;
    Vec value[Words::kValues][kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const int64_t offset = kVecsPerWordRow == 1 ? v * tile_bytes : v * kVectorBytes;
      const WordVec words = LoadWords(word_row + offset);
      if constexpr (Words::kValues == 2) {
        value[0][v] = LowHalf(words);
        value[1][v] = HighHalf(words);
      } else {
        value[0][v] = reinterpret_cast<Vec>(words);
      }
    }
    fetched.Step();
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int i = 0; i < Words::kValues; ++i) {
        const float q_value = q[r][p * Words::kValues + i];
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) sum[r][v] += q_value * value[i][v];
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) Store(scores[r] + v * score_step, sum[r][v]);
  }
}

// Scores of a group against the first num_tiles tiles of a K plane. `lines` are fetched meanwhile.
template <typename Words, int kRows>
inline void ScoreBlock(const std::byte* k, int k_dim, int num_tiles, const float* const* q,
                       float (*scores)[kBlockTokens], LinesAhead& ahead, int64_t lines) {
  const int64_t tile_bytes = int64_t{kTileTokens} * k_dim * 4 / Words::kValues;
  const int num_word_rows = k_dim / Words::kValues;
  const auto at = [scores](int token) {
    return reinterpret_cast<float(*)[kBlockTokens]>(&scores[0][token]);
  };
  const int64_t tile_lines = lines / kTilesPerBlock;
  if constexpr (kVecsPerWordRow == 1) {
    int t = 0;
    for (; t + kGroupVecs <= num_tiles; t += kGroupVecs) {
      ScoreVecs<Words, kRows, kGroupVecs>(k + t * tile_bytes, tile_bytes, num_word_rows, q,
                                          at(t * kTileTokens), kTileTokens,
                                          ahead.Take(kGroupVecs * tile_lines, num_word_rows));
    }
    for (; t < num_tiles; ++t) {
      ScoreVecs<Words, kRows, 1>(k + t * tile_bytes, 0, num_word_rows, q, at(t * kTileTokens), 0,
                                 ahead.Take(tile_lines, num_word_rows));
    }
  } else {
    for (int t = 0; t < num_tiles; ++t) {
      for (int part = 0; part < kVecsPerWordRow; part += kGroupVecs) {
        ScoreVecs<Words, kRows, kGroupVecs>(
            k + t * tile_bytes + part * kVectorBytes, 0, num_word_rows, q,
            at(t * kTileTokens + part * kLanes), kLanes,
            ahead.Take(tile_lines * kGroupVecs / kVecsPerWordRow, num_word_rows));
      }
    }
  }
}

// o[row][d] = o[row][d] * factor[row] + sum of p[row][t] * V[t][d] over tokens [begin, end), for
// kVecs vectors of dims. `v` is at the first of these dims; `begin` is even with bf16 words.
template <typename Words, int kRows, int kVecs>
inline void AddValues(const std::byte* v, int64_t row_bytes, int begin, int end,
                      const float (*p)[kBlockTokens], const float* factor, float* const* o_rows,
                      int dim, FetchedLines fetched) {
  Vec sum[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int d = 0; d < kVecs; ++d) sum[r][d] = Load(o_rows[r] + dim + d * kLanes) * factor[r];
  }
  int t = begin;
  for (; t + Words::kValues <= end; t += Words::kValues) {
    const std::byte* words_at = v + (t / Words::kValues) * row_bytes;
    Vec value[Words::kValues][kVecs];
#pragma GCC unroll 4
    for (int d = 0; d < kVecs; ++d) {
      const WordVec words = LoadWords(words_at + d * kVectorBytes);
      if constexpr (Words::kValues == 2) {
        value[0][d] = LowHalf(words);
        value[1][d] = HighHalf(words);
      } else {
        value[0][d] = reinterpret_cast<Vec>(words);
      }
    }
    fetched.Step();
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int i = 0; i < Words::kValues; ++i) {
#pragma GCC unroll 4
        for (int d = 0; d < kVecs; ++d) sum[r][d] += p[r][t + i] * value[i][d];
      }
    }
  }
  if constexpr (Words::kValues == 2) {
    if (t < end) {  // The lower half of a last word; the upper is not this row's to see.
#pragma GCC unroll 4
      for (int d = 0; d < kVecs; ++d) {
        const Vec value = LowHalf(LoadWords(v + (t / 2) * row_bytes + d * kVectorBytes));
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[r][d] += p[r][t] * value;
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int d = 0; d < kVecs; ++d) Store(o_rows[r] + dim + d * kLanes, sum[r][d]);
  }
}

// All of num_dims (a multiple of 32) output dims of a group. `lines` are fetched meanwhile.
template <typename Words, int kRows>
inline void AddValueDims(const std::byte* v, int64_t row_bytes, int num_dims, int begin, int end,
                         const float (*p)[kBlockTokens], const float* factor, float* const* o_rows,
                         int first_dim, LinesAhead& ahead, int64_t lines) {
  static_assert(kDimMultiple % (kGroupVecs * kLanes) == 0);
  const int steps = (end - begin) / Words::kValues;
  for (int d = 0; d < num_dims; d += kGroupVecs * kLanes) {
    AddValues<Words, kRows, kGroupVecs>(
        v + int64_t{d} * 4, row_bytes, begin, end, p, factor, o_rows, first_dim + d,
        ahead.Take(lines * kGroupVecs * kLanes / num_dims, steps > 0 ? steps : 1));
  }
}

// As AddValueDims with a count for each row: the tokens that all rows see together, then each row's
// own. A row never multiplies a value that it does not see, even by zero: that value may be NaN.
template <typename Words, int kRows>
inline void AddSeenValues(const std::byte* v, int64_t row_bytes, int num_dims, const int* counts,
                          const float (*p)[kBlockTokens], const float* factor, float* const* o_rows,
                          int first_dim, LinesAhead& ahead, int64_t lines) {
  int shared = counts[0];
  bool equal = true;
  for (int r = 1; r < kRows; ++r) {
    equal = equal && counts[r] == counts[0];
    shared = counts[r] < shared ? counts[r] : shared;
  }
  if (!equal) shared = shared / Words::kValues * Words::kValues;
  AddValueDims<Words, kRows>(v, row_bytes, num_dims, 0, shared, p, factor, o_rows, first_dim, ahead,
                             lines);
  if (equal) return;
  const float one = 1.0f;
  for (int r = 0; r < kRows; ++r) {
    if (counts[r] == shared) continue;
    AddValueDims<Words, 1>(v, row_bytes, num_dims, shared, counts[r], p + r, &one, o_rows + r,
                           first_dim, ahead, 0);
  }
}

// Writes dims [first_dim, first_dim + num_dims) of the first num_tiles tiles of a K plane as rows
// of float: to[token][kValueDims].
template <typename Words>
inline void TransposeKeys(const std::byte* k, int k_dim, int num_tiles, int first_dim, int num_dims,
                          float* to) {
  const int64_t tile_bytes = int64_t{kTileTokens} * k_dim * 4 / Words::kValues;
  for (int t = 0; t < num_tiles; ++t) {
    for (int part = 0; part < kVecsPerWordRow; ++part) {
      const std::byte* from = k + t * tile_bytes + part * kVectorBytes;
      float* to_tokens = to + int64_t{t * kTileTokens + part * kLanes} * kValueDims;
      for (int d = 0; d < num_dims; d += kLanes * Words::kValues) {
        const int64_t word_row = (first_dim + d) / Words::kValues;
        WordVec rows[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) rows[i] = LoadWords(from + (word_row + i) * kWordRowBytes);
        Transpose(rows);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          float* to_row = to_tokens + i * kValueDims + d;
          if constexpr (Words::kValues == 2) {
            alignas(kVectorBytes) uint16_t halves[2 * kLanes];
            __builtin_memcpy(halves, &rows[i], sizeof(halves));
            Store(to_row, LoadBf16(halves));
            Store(to_row + kLanes, LoadBf16(halves + kLanes));
          } else {
            Store(to_row, reinterpret_cast<Vec>(rows[i]));
          }
        }
      }
    }
  }
}

// What a panel of rows keeps between the scores of a block and its values.
struct Panel {
  float p[kPanelRows][kBlockTokens];
  float factor[kPanelRows];
  int counts[kPanelRows];
};

// Scores and softmax of rows [first, last) on one block: the most tokens that any of them sees.
template <typename Words>
inline int ScorePanel(const FlatAttentionArgs& args, const KvHeadBlock& block, int first, int last,
                      Panel& panel, LinesAhead& ahead, int64_t lines) {
  int most_of_all = 0;
  const int64_t group_lines = lines / NumRowGroups<kVecRows>(last - first);
  ForRowGroups<kVecRows>(first, last, [&]<int kRows>(int row) {
    const int slot = row - first;
    int most = 0;
    for (int r = 0; r < kRows; ++r) {
      const int count = SeenTokens(args, block, row + r);
      panel.counts[slot + r] = count;
      panel.factor[slot + r] = 1.0f;
      most = count > most ? count : most;
    }
    if (most == 0) return;
    most_of_all = most > most_of_all ? most : most_of_all;
    ScoreBlock<Words, kRows>(block.k, args.k_dim, (most + kTileTokens - 1) / kTileTokens,
                             args.q + row, panel.p + slot, ahead, group_lines);
    for (int r = 0; r < kRows; ++r) {
      if (panel.counts[slot + r] == 0) continue;
      float* const scores = panel.p[slot + r];
      panel.factor[slot + r] =
          SoftmaxRow(scores, panel.counts[slot + r], args.m[row + r], args.l[row + r],
                     [scores](int t, Vec power) { Store(scores + t, power); });
    }
  });
  return most_of_all;
}

template <typename Words>
inline void AddPanelValues(const FlatAttentionArgs& args, int first, int last, const Panel& panel,
                           const std::byte* v, int64_t row_bytes, int dim, int num_dims,
                           LinesAhead& ahead, int64_t lines) {
  const int64_t group_lines = lines / NumRowGroups<kVecRows>(last - first);
  ForRowGroups<kVecRows>(first, last, [&]<int kRows>(int row) {
    const int slot = row - first;
    AddSeenValues<Words, kRows>(v, row_bytes, num_dims, panel.counts + slot, panel.p + slot,
                                panel.factor + slot, args.o + row, dim, ahead, group_lines);
  });
}

// One block whose values have a plane of their own, for one panel of rows: each plane is used by
// all of them before the next one, so that it comes from memory at an even pace.
template <typename Words>
inline void AttendBlock(const FlatAttentionArgs& args, const KvHeadBlock& block,
                        const KvHeadBlock* next, int first, int last, Panel& panel) {
  constexpr int kValueBytes = 4 / Words::kValues;
  const int64_t k_bytes = int64_t{kBlockTokens} * args.k_dim * kValueBytes;
  const int64_t v_bytes = int64_t{kBlockTokens} * args.v_dim * kValueBytes;
  LinesAhead ahead(block, next, k_bytes, v_bytes, PlanesAhead(args.fetch_first), args.fetch_first);
  ScorePanel<Words>(args, block, first, last, panel, ahead, k_bytes / kLineBytes);
  AddPanelValues<Words>(args, first, last, panel, block.v, int64_t{args.v_dim} * 4, 0, args.v_dim,
                        ahead, v_bytes / kLineBytes);
}

// One block whose key holds its value, for one panel of rows. The next one is fetched while scores
// are computed, since the values are read from the cache.
template <typename Words>
inline void AttendLatentBlock(const FlatAttentionArgs& args, const KvHeadBlock& block,
                              const KvHeadBlock* next, int first, int last, Panel& panel,
                              float* values) {
  const int64_t k_bytes = int64_t{kBlockTokens} * args.k_dim * 4 / Words::kValues;
  LinesAhead ahead(block, next, k_bytes, 0, kBlockAhead, false);
  const int most = ScorePanel<Words>(args, block, first, last, panel, ahead, k_bytes / kLineBytes);
  const int num_tiles = (most + kTileTokens - 1) / kTileTokens;
  if (num_tiles == 0) return;
  for (int dim = 0; dim < args.v_dim; dim += kValueDims) {
    const int num_dims = args.v_dim - dim < kValueDims ? args.v_dim - dim : kValueDims;
    TransposeKeys<Words>(block.k, args.k_dim, num_tiles, dim, num_dims, values);
    AddPanelValues<F32Words>(args, first, last, panel, reinterpret_cast<const std::byte*>(values),
                             kValueDims * 4, dim, num_dims, ahead, 0);
  }
}

template <typename Words>
inline void AttendBlocks(const FlatAttentionArgs& args) {
  alignas(64) Panel panel;
  alignas(64) float values[kBlockTokens * kValueDims];
  for (int64_t i = 0; i < args.num_blocks; ++i) {
    const KvHeadBlock& block = args.blocks[i];
    const KvHeadBlock* next = BlockAfter(args, i, 1);
    const int first_row = static_cast<int>(i % args.num_heads) * args.num_rows;
    const int last_row = first_row + args.num_rows;
    for (int first = first_row; first < last_row; first += kPanelRows) {
      const int last = first + kPanelRows < last_row ? first + kPanelRows : last_row;
      // The first panel brings this block into the cache, the last one the next.
      const KvHeadBlock* after = last == last_row ? next : nullptr;
      if (args.value_in_key) {
        AttendLatentBlock<Words>(args, block, after, first, last, panel, values);
      } else {
        AttendBlock<Words>(args, block, after, first, last, panel);
      }
    }
  }
}

inline void AttentionPartialVec(const FlatAttentionArgs& args) {
  if (args.is_f32) {
    AttendBlocks<F32Words>(args);
  } else {
    AttendBlocks<Bf16Words>(args);
  }
}

}  // namespace
}  // namespace writescope::kernels
