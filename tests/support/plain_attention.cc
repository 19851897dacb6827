#include "tests/support/plain_attention.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace writescope::testing {

PlainOutput AttendPlain(const PlainHead& head, int64_t num_tokens, std::span<const float> q) {
  PlainOutput result;
  result.out.assign(static_cast<size_t>(head.v_dim), 0);
  result.abs_sum = result.sq_sum = result.out;
  std::vector<double> weights(static_cast<size_t>(num_tokens));
  double highest = -INFINITY;
  for (size_t t = 0; t < weights.size(); ++t) {
    const float* k = &head.k[t * static_cast<size_t>(head.k_dim)];
    double score = 0;
    for (size_t d = 0; d < q.size(); ++d) score += static_cast<double>(q[d]) * k[d];
    weights[t] = score;
    highest = std::max(highest, score);
    result.max_abs_score = std::max(result.max_abs_score, std::fabs(score));
  }
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp2(weight - highest);
  for (size_t t = 0; t < weights.size(); ++t) {
    const double p = weights[t] / sum;
    const float* v = &head.v[t * static_cast<size_t>(head.v_dim)];
    for (size_t d = 0; d < result.out.size(); ++d) {
      result.out[d] += p * v[d];
      result.abs_sum[d] += p * std::fabs(v[d]);
      result.sq_sum[d] += p * p * v[d] * v[d];
    }
  }
  result.tolerance = FloatTolerance(head, num_tokens, result);
  return result;
}

double FloatTolerance(const PlainHead& head, int64_t num_tokens, const PlainOutput& plain) {
  double max_v = 0;
  const size_t count = static_cast<size_t>(num_tokens * head.v_dim);
  for (size_t i = 0; i < count; ++i) max_v = std::max<double>(max_v, std::fabs(head.v[i]));
  // Additions of k_dim products and of num_tokens weights in several lanes: errors grow like the
  // square root of their number; 2 eps more for the exponential and the last rounding.
  const double score_error = std::sqrt(head.k_dim) * FLT_EPSILON * (plain.max_abs_score + 1);
  const double sum_error = (std::sqrt(static_cast<double>(num_tokens)) + 2) * FLT_EPSILON;
  return 2 * max_v * (0.7 * score_error + sum_error);
}

double Bf16Bound(const PlainOutput& plain, int d) {
  const size_t at = static_cast<size_t>(d);
  return 0x1p-8 * (plain.abs_sum[at] + std::fabs(plain.out[at]));
}

double Bf16SixSigma(const PlainOutput& plain, int d) {
  return 6 * 0x1p-8 / std::sqrt(3.0) * std::sqrt(plain.sq_sum[static_cast<size_t>(d)]);
}

}  // namespace writescope::testing
