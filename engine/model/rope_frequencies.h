// Rotary position embedding: the angle that each pair of dims turns by per position, and what YaRN
// does to it, to the cosines and to the softmax scale. Pure; any thread.
#pragma once

#include <vector>

#include "engine/model/config.h"

namespace writescope::model {

// Pairs below `low` keep their frequency, pairs from `high` on are slowed by the factor; between
// the two the share grows linearly.
struct YarnRange {
  double low;
  double high;  // Above low.
};
YarnRange YarnCorrectionRange(const RopeConfig& rope);

// 0.1 * mscale * ln(factor) + 1, and 1 for a factor of 1 or less.
double YarnMscale(double factor, double mscale);

// The multiplier of cos and sin under YaRN: the ratio of the two mscales.
double YarnAttentionFactor(const RopeConfig& rope);

// [rope.dim / 2], radians per position, in f32 steps as the reference takes them. The angle at a
// position is f32(position) * frequency.
std::vector<float> InverseFrequencies(const RopeConfig& rope);

// What q . k is multiplied by before softmax: qk_head_dim^-0.5, and under MLA with YaRN also the
// square of YarnMscale(factor, mscale_all_dim).
float SoftmaxScale(const ModelConfig& config);

}  // namespace writescope::model
