// Built with -mavx512bf16 and what it rests on: vdpbf16ps takes a word of K and a pair of the
// query, or a word of V and a pair of weights, as they lie.
//
// Where vdpbf16ps is issued as often as a fused multiply-add this is up to 1.7 times as fast as the
// AVX-512 kernel. Where it is not, the latter is faster by a tenth in spite of its conversions, and
// is what ActiveAttentionVariant() gives: see HasFastBf16Products().
#define WRITESCOPE_VECTOR_BYTES 64
#include <immintrin.h>

#include "engine/kernels/attention_bf16_panels.h"

namespace writescope::kernels {
namespace {

constexpr int kGroupVecs = 4;  // 4 rows x 4 vectors of accumulators: half of the registers.
constexpr int kPairs = kBlockTokens / 2;
constexpr int kLatentDims = 64;  // Of a latent, transposed at a time (8 KiB)

WRITESCOPE_INLINE __m512bh AsPairs(WordVec words) { return reinterpret_cast<__m512bh>(words); }
WRITESCOPE_INLINE Vec AddProducts(Vec sum, WordVec words, uint32_t pair) {
  return _mm512_dpbf16_ps(sum, AsPairs(words), AsPairs(WordVec{} + pair));
}

// Scores of kRows rows against a K plane. q[r] is at the row's words of the first query tile.
template <int kRows>
inline void ScoreBlock(const std::byte* k, int k_dim, const uint32_t* const (&q)[kRows],
                       float (*scores)[kBlockTokens], NextLines& next) {
  const int64_t tile_bytes = int64_t{kTileTokens} * k_dim * 2;
  Vec sum[kRows][kTilesPerBlock] = {};
  for (int64_t tile = 0; tile < k_dim / kTileDims; ++tile) {
    for (int64_t p = 0; p < kTileWords; ++p) {
      const std::byte* word_row = k + (tile * kTileWords + p) * kLineBytes;
      WordVec words[kTilesPerBlock];
#pragma GCC unroll 4
      for (int t = 0; t < kTilesPerBlock; ++t) words[t] = LoadWords(word_row + t * tile_bytes);
      next.Fetch();
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const uint32_t pair = q[r][tile * kPanelRows * kTileWords + p];
#pragma GCC unroll 4
        for (int t = 0; t < kTilesPerBlock; ++t) sum[r][t] = AddProducts(sum[r][t], words[t], pair);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < kTilesPerBlock; ++t) Store(scores[r] + t * kLanes, sum[r][t]);
  }
}

// o[r][..] = o[r][..] * factor[r] + sum of p[r][pair] . V[pair][..] for kVecs vectors of dims.
template <int kRows, int kVecs>
inline void AddValues(const std::byte* v, int64_t row_bytes, const uint32_t* const (&p)[kRows],
                      const float (&factor)[kRows], float* const (&o)[kRows], NextLines& next) {
  Vec sum[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int d = 0; d < kVecs; ++d) sum[r][d] = Load(o[r] + d * kLanes) * factor[r];
  }
  for (int64_t pair = 0; pair < kPairs; ++pair) {
    WordVec words[kVecs];
#pragma GCC unroll 4
    for (int d = 0; d < kVecs; ++d) words[d] = LoadWords(v + pair * row_bytes + d * kVectorBytes);
    next.Fetch();
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int d = 0; d < kVecs; ++d) sum[r][d] = AddProducts(sum[r][d], words[d], p[r][pair]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int d = 0; d < kVecs; ++d) Store(o[r] + d * kLanes, sum[r][d]);
  }
}

typedef uint64_t PairVec __attribute__((vector_size(64)));  // Two words of one pair of tokens.

template <int step, int... i>
WRITESCOPE_INLINE void ExchangePairs(PairVec& low, PairVec& high,
                                     std::integer_sequence<int, i...>) {
  const PairVec new_low = __builtin_shufflevector(low, high, ((i & step) ? 8 + (i ^ step) : i)...);
  high = __builtin_shufflevector(low, high, ((i & step) ? 8 + i : (i | step))...);
  low = new_low;
}
template <int step = 4>
WRITESCOPE_INLINE void TransposePairs(PairVec (&rows)[8]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    if (!(i & step)) {
      ExchangePairs<step>(rows[i], rows[i | step], std::make_integer_sequence<int, 8>());
    }
  }
  if constexpr (step > 1) TransposePairs<step / 2>(rows);
}

// Dims [first_dim, first_dim + num_dims) of a latent block in the format of values:
// to[pair of tokens][dim].
inline void LatentToValues(const std::byte* k, int k_dim, int first_dim, int num_dims,
                           uint32_t (*to)[kLatentDims]) {
  // In 64 bits, the words of two tokens {a0 a1 b0 b1} become those of two dims {a0 b0 a1 b1}.
  const __m512i swap_middle = _mm512_set4_epi32(0x0f0e0b0a, 0x0d0c0908, 0x07060302, 0x05040100);
  for (int t = 0; t < kTilesPerBlock; ++t) {
    const std::byte* tile = k + int64_t{t} * kTileTokens * k_dim * 2;
    for (int d = 0; d < num_dims; d += 16) {
      PairVec rows[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const WordVec words = LoadWords(tile + int64_t{(first_dim + d) / 2 + i} * kLineBytes);
        rows[i] = reinterpret_cast<PairVec>(
            _mm512_shuffle_epi8(reinterpret_cast<__m512i>(words), swap_middle));
      }
      TransposePairs(rows);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        Store(reinterpret_cast<float*>(&to[t * 8 + i][d]), reinterpret_cast<Vec>(rows[i]));
      }
    }
  }
}

class Avx512Bf16Kernel {
 public:
  static void AttendInF32(const FlatAttentionArgs& args) { AttentionPartialAvx512(args); }

  void WholeBlock(const FlatAttentionArgs& args, const WholeRows& rows, const QueryTiles& q,
                  const KvHeadBlock& block, const KvHeadBlock* next_block) {
    // With a latent the values are read from the cache: all lines come while scores are computed.
    int groups = 0;
    ForRowGroups(0, rows.num_rows, [&]<int kRows>(int) { ++groups; });
    const int64_t value_steps = args.value_in_key ? 0 : int64_t{kPairs} * (args.v_dim + 63) / 64;
    NextLines next(args, next_block, groups * (args.k_dim / 2 + value_steps));
    ForRowGroups(0, rows.num_rows,
                 [&]<int kRows>(int at) { WeighGroup<kRows>(args, rows, at, q, block, next); });
    if (!args.value_in_key) {
      AddDims(args, rows, block.v, int64_t{args.v_dim} * 4, 0, args.v_dim, next);
      return;
    }
    for (int dim = 0; dim < args.v_dim; dim += kLatentDims) {
      const int num_dims = args.v_dim - dim < kLatentDims ? args.v_dim - dim : kLatentDims;
      LatentToValues(block.k, args.k_dim, dim, num_dims, values_);
      AddDims(args, rows, reinterpret_cast<const std::byte*>(values_), kLatentDims * 4, dim,
              num_dims, next);
    }
  }

 private:
  // Scores and softmax of rows [at, at + kRows) of the list.
  template <int kRows>
  void WeighGroup(const FlatAttentionArgs& args, const WholeRows& rows, int at, const QueryTiles& q,
                  const KvHeadBlock& block, NextLines& next) {
    alignas(64) float scores[kRows][kBlockTokens];
    const uint32_t* q_words[kRows];
    for (int r = 0; r < kRows; ++r) q_words[r] = q.words[0][rows.row[at + r]];
    ScoreBlock<kRows>(block.k, args.k_dim, q_words, scores, next);
    for (int r = 0; r < kRows; ++r) {
      const int row = rows.first_row + rows.row[at + r];
      factor_[at + r] = SoftmaxRow(scores[r], kBlockTokens, args.m[row], args.l[row]);
      for (int t = 0; t < kBlockTokens; t += kLanes) {
        StoreBf16(reinterpret_cast<std::byte*>(p_[at + r]) + 2 * t, Load(scores[r] + t));
      }
    }
  }

  // Output dims [dim, dim + num_dims) of all rows; `v` is at the first of them.
  void AddDims(const FlatAttentionArgs& args, const WholeRows& rows, const std::byte* v,
               int64_t row_bytes, int dim, int num_dims, NextLines& next) {
    for (int d = 0; d < num_dims; d += kGroupVecs * kLanes) {
      ForRowGroups(0, rows.num_rows, [&]<int kRows>(int at) {
        const uint32_t* p[kRows];
        float factor[kRows];
        float* o[kRows];
        for (int r = 0; r < kRows; ++r) {
          p[r] = p_[at + r];
          factor[r] = factor_[at + r];
          o[r] = args.o[rows.first_row + rows.row[at + r]] + dim + d;
        }
        if (num_dims - d >= kGroupVecs * kLanes) {
          AddValues<kRows, kGroupVecs>(v + int64_t{d} * 4, row_bytes, p, factor, o, next);
        } else {
          AddValues<kRows, 2>(v + int64_t{d} * 4, row_bytes, p, factor, o, next);
        }
      });
    }
  }

  alignas(64) uint32_t p_[kPanelRows][kPairs];  // Weights, rounded
  float factor_[kPanelRows];
  alignas(64) uint32_t values_[kPairs][kLatentDims];
};

}  // namespace

void AttentionPartialAvx512Bf16(const FlatAttentionArgs& args) {
  AttendByPanels<Avx512Bf16Kernel>(args);
}

}  // namespace writescope::kernels
