#include "engine/model/rope_frequencies.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "engine/base/check.h"

namespace writescope::model {
namespace {

// The pair (a real number) that turns `rotations` times over the original context: from
// P * theta^(-2i/dim) = 2 pi rotations.
double PairOfRotations(const RopeConfig& rope, double rotations) {
  return rope.dim * std::log(rope.original_max_positions / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(rope.theta));
}

// theta^(2i/dim). The exponent is rounded to f32 before the power, as in the reference; the power
// itself is then right to the last bit.
float InversePower(const RopeConfig& rope, int pair) {
  const float exponent = static_cast<float>(2 * pair) / static_cast<float>(rope.dim);
  return static_cast<float>(std::pow(rope.theta, static_cast<double>(exponent)));
}

}  // namespace

YarnRange YarnCorrectionRange(const RopeConfig& rope) {
  YarnRange range{PairOfRotations(rope, rope.beta_fast), PairOfRotations(rope, rope.beta_slow)};
  if (rope.truncate_range) {
    range.low = std::floor(range.low);
    range.high = std::ceil(range.high);
  }
  range.low = std::max(range.low, 0.0);
  range.high = std::min(range.high, rope.dim - 1.0);
  if (range.low == range.high) range.high += 0.001;  // The ramp divides by the difference.
  return range;
}

double YarnMscale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double YarnAttentionFactor(const RopeConfig& rope) {
  return YarnMscale(rope.factor, rope.mscale) / YarnMscale(rope.factor, rope.mscale_all_dim);
}

std::vector<float> InverseFrequencies(const RopeConfig& rope) {
  CHECK(rope.dim > 0 && rope.dim % 2 == 0) << "rope over " << rope.dim << " dims";
  std::vector<float> frequencies(rope.dim / 2);
  for (int i = 0; i < rope.dim / 2; ++i) frequencies[i] = 1.0f / InversePower(rope, i);
  if (rope.kind == RopeConfig::Kind::kDefault) return frequencies;

  const YarnRange range = YarnCorrectionRange(rope);
  const float low = static_cast<float>(range.low);
  const float width = static_cast<float>(range.high - range.low);
  const float factor = static_cast<float>(rope.factor);
  for (int i = 0; i < rope.dim / 2; ++i) {
    const float ramp = std::clamp((static_cast<float>(i) - low) / width, 0.0f, 1.0f);
    const float slowed = 1.0f / (factor * InversePower(rope, i));
    frequencies[i] = slowed * ramp + frequencies[i] * (1.0f - ramp);
  }
  return frequencies;
}

float SoftmaxScale(const ModelConfig& config) {
  double scale = 1.0 / std::sqrt(static_cast<double>(config.qk_head_dim()));
  if (config.mla && config.rope.kind == RopeConfig::Kind::kYarn) {
    const double m = YarnMscale(config.rope.factor, config.rope.mscale_all_dim);
    scale *= m * m;
  }
  return static_cast<float>(scale);
}

}  // namespace writescope::model
