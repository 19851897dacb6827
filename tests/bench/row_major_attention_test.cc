// The kernel that the tile format is compared with must be right, or the comparison is worth
// nothing.
#include "tests/bench/row_major_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "engine/base/bf16.h"
#include "engine/base/cpu_features.h"

namespace writescope::bench {
namespace {

TEST(RowMajorAttention, EqualsPlainAttention) {
  if (DetectedCpuIsa() < CpuIsa::kAvx512Bf16) GTEST_SKIP() << "no AVX512-BF16";
  constexpr int kPages = 5, kTokens = kPages * kPageTokens;
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> kv(kPages * kPageHeadBytes / 2);
  for (uint16_t& value : kv) value = FloatToBf16(normal(rng));
  const auto key = [&](int token, int dim) {
    return Bf16ToFloat(
        kv[token / kPageTokens * kPageHeadBytes / 2 + token % kPageTokens * kRowMajorDim + dim]);
  };
  const auto value = [&](int token, int dim) {
    return Bf16ToFloat(kv[token / kPageTokens * kPageHeadBytes / 2 + kPageHeadBytes / 4 +
                          token % kPageTokens * kRowMajorDim + dim]);
  };
  for (const int num_rows : {4, 8}) {
    RowMajorState state = {};
    state.num_rows = num_rows;
    for (int r = 0; r < num_rows; ++r) {
      state.m[r] = -std::numeric_limits<float>::infinity();
      for (uint16_t& q : state.q[r]) q = FloatToBf16(normal(rng) / 8);
    }
    for (int page = 0; page < kPages; ++page) {
      AttendRowMajor(reinterpret_cast<const std::byte*>(kv.data()) + page * kPageHeadBytes, state);
    }
    for (int r = 0; r < num_rows; ++r) {
      std::vector<double> weights(kTokens), want(kRowMajorDim), bound(kRowMajorDim);
      double sum = 0;
      for (int t = 0; t < kTokens; ++t) {
        double score = 0;
        for (int d = 0; d < kRowMajorDim; ++d) {
          score += double{Bf16ToFloat(state.q[r][d])} * key(t, d);
        }
        weights[t] = std::exp2(score);
        sum += weights[t];
      }
      float got[kRowMajorDim];
      FinishRowMajor(state, r, got);
      for (int d = 0; d < kRowMajorDim; ++d) {
        for (int t = 0; t < kTokens; ++t) {
          want[d] += weights[t] / sum * value(t, d);
          bound[d] += weights[t] / sum * std::fabs(value(t, d));
        }
        EXPECT_NEAR(got[d], want[d], bound[d] / 256) << "row " << r << " dim " << d;
      }
    }
  }
}

}  // namespace
}  // namespace writescope::bench
