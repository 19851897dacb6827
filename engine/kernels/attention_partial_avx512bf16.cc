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

// Rows and vectors that share loads, 16 accumulators in all: as many as hide the latency of two
// products a cycle. Memory is read in the order in which it lies, as far as that goes: tiles two at
// a time, since four streams that lie 4 KiB apart come a quarter slower than one, and whole rows of
// V by two rows of queries, after which the others find them in the first cache.
constexpr int kScoreRows = 8;
constexpr int kScoreTiles = 2;
constexpr int kValueRows = 4;
constexpr int kValueVecs = 4;
constexpr int kWideRows = 2;
constexpr int kWideVecs = 8;
constexpr int kWideDims = kWideVecs * kLanes;
constexpr int kPairs = kBlockTokens / 2;
constexpr int kLatentDims = 64;  // Of a latent, transposed at a time (8 KiB)

WRITESCOPE_INLINE __m512bh AsPairs(WordVec words) { return reinterpret_cast<__m512bh>(words); }
WRITESCOPE_INLINE Vec AddProducts(Vec sum, WordVec words, uint32_t pair) {
  return _mm512_dpbf16_ps(sum, AsPairs(words), AsPairs(WordVec{} + pair));
}

// Scores of kRows rows against a K plane. q[r] is at the row's words of the first query tile.
template <int kRows>
inline void ScoreBlock(const std::byte* k, int k_dim, const uint32_t* const (&q)[kRows],
                       float (*scores)[kBlockTokens], LinesAhead& ahead, int64_t lines) {
  constexpr int kParts = kTilesPerBlock / kScoreTiles;
  const int64_t tile_bytes = int64_t{kTileTokens} * k_dim * 2;
  for (int first = 0; first < kTilesPerBlock; first += kScoreTiles, k += kScoreTiles * tile_bytes) {
    FetchedLines fetched = ahead.Take(lines / kParts, k_dim / 2);
    Vec sum[kRows][kScoreTiles] = {};
    for (int64_t tile = 0; tile < k_dim / kTileDims; ++tile) {
      for (int64_t p = 0; p < kTileWords; ++p) {
        const std::byte* word_row = k + (tile * kTileWords + p) * kLineBytes;
        WordVec words[kScoreTiles];
#pragma GCC unroll 4
        for (int t = 0; t < kScoreTiles; ++t) words[t] = LoadWords(word_row + t * tile_bytes);
        fetched.Step();
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const uint32_t pair = q[r][tile * kPanelRows * kTileWords + p];
#pragma GCC unroll 4
          for (int t = 0; t < kScoreTiles; ++t) sum[r][t] = AddProducts(sum[r][t], words[t], pair);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < kScoreTiles; ++t) Store(scores[r] + (first + t) * kLanes, sum[r][t]);
    }
  }
}

// o[r][..] = o[r][..] * factor[r] + sum of p[r][pair] . V[pair][..] for kVecs vectors of dims.
template <int kRows, int kVecs>
inline void AddValues(const std::byte* v, int64_t row_bytes, const uint32_t (*p)[kPairs],
                      const float* factor, float* const (&o)[kRows], FetchedLines fetched) {
  Vec sum[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int d = 0; d < kVecs; ++d) sum[r][d] = Load(o[r] + d * kLanes) * factor[r];
  }
  for (int64_t pair = 0; pair < kPairs; ++pair) {
    WordVec words[kVecs];
#pragma GCC unroll 8
    for (int d = 0; d < kVecs; ++d) words[d] = LoadWords(v + pair * row_bytes + d * kVectorBytes);
    fetched.Step();
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int d = 0; d < kVecs; ++d) sum[r][d] = AddProducts(sum[r][d], words[d], p[r][pair]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
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
  static constexpr bool kWholeTiles = false;
  static constexpr int kAhead = 1;  // Blocks from the one that is attended to to what is fetched
  static void AttendInF32(const FlatAttentionArgs& args) { AttentionPartialAvx512(args); }

  explicit Avx512Bf16Kernel(int) {}

  // The sums stay where the caller has them.
  void Begin(const FlatAttentionArgs&, int, int) {}
  void End(const FlatAttentionArgs&, int, int) {}
  void Resume(const FlatAttentionArgs&, int) {}
  void Suspend(const FlatAttentionArgs&) {}

  void WholeBlock(const FlatAttentionArgs& args, const WholeRows& rows, QueryTiles q,
                  const KvHeadBlock& block, const KvHeadBlock* next_block) {
    if (args.value_in_key) {
      AttendLatent(args, rows, q, block, next_block);
    } else {
      AttendPlanes(args, rows, q, block, next_block);
    }
  }

 private:
  void AttendPlanes(const FlatAttentionArgs& args, const WholeRows& rows, QueryTiles q,
                    const KvHeadBlock& block, const KvHeadBlock* next_block) {
    const bool is_once = rows.num_rows <= kValueRows;
    const int64_t k_lines = int64_t{args.k_dim} * 2, v_lines = int64_t{args.v_dim} * 2;
    // With so few rows that a V plane is used once, the way ahead need not cover it.
    const int64_t ahead_bytes = PlanesAhead(args.fetch_first) / (is_once ? 2 : 1);
    LinesAhead ahead(block, next_block, k_lines * kLineBytes, v_lines * kLineBytes, ahead_bytes,
                     args.fetch_first);
    Score(args, rows, q, block, ahead, k_lines);
    const int64_t row_bytes = int64_t{args.v_dim} * 4;
    const int wide_dims = is_once ? 0 : args.v_dim / kWideDims * kWideDims;
    AddDims<kWideRows, kWideVecs>(args, rows, block.v, row_bytes, 0, wide_dims, ahead,
                                  v_lines * wide_dims / args.v_dim);
    AddDims<kValueRows, kValueVecs>(args, rows, block.v + int64_t{wide_dims} * 4, row_bytes,
                                    wide_dims, args.v_dim - wide_dims, ahead,
                                    v_lines - v_lines * wide_dims / args.v_dim);
  }

  // The plane is read again for the values, 64 dims at a time, from the second cache.
  void AttendLatent(const FlatAttentionArgs& args, const WholeRows& rows, QueryTiles q,
                    const KvHeadBlock& block, const KvHeadBlock* next_block) {
    const int64_t lines = int64_t{args.k_dim} * 2;
    LinesAhead ahead(block, next_block, lines * kLineBytes, 0, kBlockAhead, false);
    Score(args, rows, q, block, ahead, lines / 2);
    for (int dim = 0; dim < args.v_dim; dim += kLatentDims) {
      const int num_dims = args.v_dim - dim < kLatentDims ? args.v_dim - dim : kLatentDims;
      LatentToValues(block.k, args.k_dim, dim, num_dims, values_);
      AddDims<kValueRows, kValueVecs>(args, rows, reinterpret_cast<const std::byte*>(values_),
                                      kLatentDims * 4, dim, num_dims, ahead,
                                      lines / 2 * num_dims / args.v_dim);
    }
  }

  void Score(const FlatAttentionArgs& args, const WholeRows& rows, QueryTiles q,
             const KvHeadBlock& block, LinesAhead& ahead, int64_t lines) {
    const int64_t group_lines = lines / NumRowGroups<kScoreRows>(rows.num_rows);
    ForRowGroups<kScoreRows>(0, rows.num_rows, [&]<int kRows>(int at) {
      const uint32_t* q_words[kRows];
      for (int r = 0; r < kRows; ++r) q_words[r] = q[0][rows.row[at + r]];
      ScoreBlock<kRows>(block.k, args.k_dim, q_words, scores_ + at, ahead, group_lines);
    });
  }

  // Softmax of rows [at, at + kRows) of the list.
  template <int kRows>
  void Weigh(const FlatAttentionArgs& args, const WholeRows& rows, int at) {
    for (int r = at; r < at + kRows; ++r) {
      const int row = rows.first_row + rows.row[r];
      auto* const p = reinterpret_cast<std::byte*>(p_[r]);
      factor_[r] = SoftmaxRow(scores_[r], kBlockTokens, args.m[row], args.l[row],
                              [p](int t, Vec power) { StoreBf16(p + 2 * t, power); });
    }
  }

  // Output dims [dim, dim + num_dims) of all rows; `v` is at the first of them. With the first dims
  // come the softmaxes, each just before its row's first products: they share the core with those
  // of the rows before, which leave half of its vector units idle.
  template <int kMostRows, int kVecs>
  void AddDims(const FlatAttentionArgs& args, const WholeRows& rows, const std::byte* v,
               int64_t row_bytes, int dim, int num_dims, LinesAhead& ahead, int64_t lines) {
    constexpr int kDims = kVecs * kLanes;
    const int num_groups = NumRowGroups<kMostRows>(rows.num_rows);
    for (int d = 0; d < num_dims; d += kDims) {
      const int dims = num_dims - d < kDims ? num_dims - d : kDims;
      ForRowGroups<kMostRows>(0, rows.num_rows, [&]<int kRows>(int at) {
        if (dim + d == 0) Weigh<kRows>(args, rows, at);
        float* o[kRows];
        for (int r = 0; r < kRows; ++r) {
          o[r] = args.o[rows.first_row + rows.row[at + r]] + dim + d;
        }
        const std::byte* from = v + int64_t{d} * 4;
        const auto fetched = ahead.Take(lines * dims / num_dims / num_groups, kPairs);
        if (dims == kDims) {
          AddValues<kRows, kVecs>(from, row_bytes, p_ + at, factor_ + at, o, fetched);
        } else {  // Of four vectors the last two: dims are a multiple of 32.
          AddValues<kRows, 2>(from, row_bytes, p_ + at, factor_ + at, o, fetched);
        }
      });
    }
  }

  alignas(64) float scores_[kPanelRows][kBlockTokens];
  alignas(64) uint32_t p_[kPanelRows][kPairs];  // Weights, rounded
  float factor_[kPanelRows];
  alignas(64) uint32_t values_[kPairs][kLatentDims];
};

}  // namespace

void AttentionPartialAvx512Bf16(const FlatAttentionArgs& args) {
  AttendByPanels<Avx512Bf16Kernel>(args);
}

}  // namespace writescope::kernels
