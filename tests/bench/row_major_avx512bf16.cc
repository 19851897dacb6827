// Built with -mavx512bf16 and what it rests on.
#include <immintrin.h>

#include "tests/bench/row_major_attention.h"

namespace writescope::bench {
namespace {

constexpr int kLanes = 16;
constexpr int kVecs = kRowMajorDim / kLanes;          // Of floats in a row
constexpr int kWordVecs = kRowMajorDim / 2 / kLanes;  // Of pairs of bf16 in a row
constexpr int64_t kRowBytes = kRowMajorDim * 2;
constexpr int64_t kAheadBytes = 16384;  // 8 and 32 KiB were slower.

inline __m512bh LoadPairs(const void* from) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from));
}
inline __m512 Exp2(__m512 x) {
  const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const __m512 whole = _mm512_maskz_roundscale_ps(counts, x, _MM_FROUND_TO_NEAREST_INT);
  const __m512 f = _mm512_sub_ps(x, whole);
  constexpr float kFactors[] = {0.0013390863314270973f, 0.009618083015084267f,
                                0.055503569543361664f,  0.24022650718688965f,
                                0.6931471824645996f,    1.0f};
  __m512 g = _mm512_set1_ps(0.00015453163359779865f);
#pragma GCC unroll 6
  for (const float factor : kFactors) g = _mm512_fmadd_ps(g, f, _mm512_set1_ps(factor));
  return _mm512_maskz_scalef_ps(counts, g, whole);
}

// Sums of the lanes of 16 vectors: lane i of the result is that of sums[i].
inline __m512 SumsOfLanes(__m512 (&sums)[kLanes]) {
  // Each stage halves the vectors and keeps the sums of both halves side by side.
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    sums[i] = _mm512_add_ps(_mm512_unpacklo_ps(sums[i], sums[i + 8]),
                            _mm512_unpackhi_ps(sums[i], sums[i + 8]));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(sums[i]), b = _mm512_castps_pd(sums[i + 4]);
    sums[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                            _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    sums[i] = _mm512_add_ps(_mm512_shuffle_f32x4(sums[i], sums[i + 2], 0x88),
                            _mm512_shuffle_f32x4(sums[i], sums[i + 2], 0xdd));
  }
  const __m512 sum = _mm512_add_ps(_mm512_shuffle_f32x4(sums[0], sums[1], 0x88),
                                   _mm512_shuffle_f32x4(sums[0], sums[1], 0xdd));
  const __m512i order = _mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15);
  return _mm512_permutexvar_ps(order, sum);
}

// Scores of one row against the 16 keys of a page.
inline __m512 Scores(const std::byte* k, const uint16_t* q) {
  __m512bh q_pairs[kWordVecs];
#pragma GCC unroll 4
  for (int i = 0; i < kWordVecs; ++i) q_pairs[i] = LoadPairs(q + 2 * kLanes * i);
  __m512 sums[kLanes];
#pragma GCC unroll 16
  for (int t = 0; t < kPageTokens; ++t) {
    sums[t] = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int i = 0; i < kWordVecs; ++i) {
      sums[t] = _mm512_dpbf16_ps(sums[t], LoadPairs(k + t * kRowBytes + 64 * i), q_pairs[i]);
    }
  }
  return SumsOfLanes(sums);
}

template <int kRows>
inline void AttendPage(const std::byte* page, const std::byte* ahead, RowMajorState& state) {
  alignas(64) uint32_t p[kRows][kPageTokens / 2];
  __m512 factor[kRows];
  constexpr int kLinesARow = kPageHeadBytes / 64 / 2 / kRows;  // Half with scores, half with values
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kLinesARow; ++i) __builtin_prefetch(ahead + 64 * i, 0, 3);
    ahead += 64 * kLinesARow;
    const __m512 scores = Scores(page, state.q[r]);
    float base = state.m[r];
    factor[r] = _mm512_set1_ps(1.0f);
    if (_mm512_cmp_ps_mask(scores, _mm512_set1_ps(base), _CMP_GT_OQ) != 0) {
      const float m_new = _mm512_reduce_max_ps(scores);
      factor[r] = Exp2(_mm512_set1_ps(base - m_new));
      state.l[r] *= _mm512_cvtss_f32(factor[r]);
      state.m[r] = base = m_new;
    }
    const __m512 powers = Exp2(_mm512_sub_ps(scores, _mm512_set1_ps(base)));
    state.l[r] += _mm512_reduce_add_ps(powers);
    _mm256_store_si256(reinterpret_cast<__m256i*>(p[r]),
                       reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(powers)));
  }
  const std::byte* v = page + kPageHeadBytes / 2;
  for (int d = 0; d < kWordVecs; ++d) {  // 32 dims: two vectors of sums
    __m512 low[kRows], high[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      low[r] = _mm512_mul_ps(_mm512_loadu_ps(&state.o[r][2 * kLanes * d]), factor[r]);
      high[r] = _mm512_mul_ps(_mm512_loadu_ps(&state.o[r][2 * kLanes * d + kLanes]), factor[r]);
    }
#pragma GCC unroll 8
    for (int pair = 0; pair < kPageTokens / 2; ++pair) {
      const __m512i even = _mm512_loadu_si512(v + 2 * pair * kRowBytes + 64 * d);
      const __m512i odd = _mm512_loadu_si512(v + (2 * pair + 1) * kRowBytes + 64 * d);
      const auto low_pairs = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(even, odd));
      const auto high_pairs = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(even, odd));
      __builtin_prefetch(ahead, 0, 3);
      __builtin_prefetch(ahead + 64, 0, 3);
      ahead += kPageHeadBytes / 2 / (kWordVecs * kPageTokens / 2);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto weights =
            reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(p[r][pair])));
        low[r] = _mm512_dpbf16_ps(low[r], low_pairs, weights);
        high[r] = _mm512_dpbf16_ps(high[r], high_pairs, weights);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      _mm512_storeu_ps(&state.o[r][2 * kLanes * d], low[r]);
      _mm512_storeu_ps(&state.o[r][2 * kLanes * d + kLanes], high[r]);
    }
  }
}

}  // namespace

void AttendRowMajor(const std::byte* page, RowMajorState& state) {
  if (state.num_rows > 4) {
    AttendPage<8>(page, page + kAheadBytes, state);
  } else {
    AttendPage<4>(page, page + kAheadBytes, state);
  }
}

void FinishRowMajor(const RowMajorState& state, int row, float* out) {
  // unpacklo and unpackhi work on 16 bytes: 8 dims, the first four of them low.
  for (int dim = 0; dim < kRowMajorDim; ++dim) {
    const int in_vecs = dim % (2 * kLanes), in_eight = dim % 8;
    const int at = dim - in_vecs + (in_eight < 4 ? 0 : kLanes) + in_vecs / 8 * 4 + in_eight % 4;
    out[dim] = state.o[row][at] / state.l[row];
  }
}

}  // namespace writescope::bench
