#include "engine/kernels/router.h"

#include <cmath>
#include <limits>

namespace writescope::kernels {
namespace {

void Softmax(int count, float* values) {
  float maximum = -std::numeric_limits<float>::infinity();
  for (int i = 0; i < count; ++i) maximum = std::fmax(maximum, values[i]);
  float sum = 0;
  for (int i = 0; i < count; ++i) {
    values[i] = std::exp(values[i] - maximum);
    sum += values[i];
  }
  for (int i = 0; i < count; ++i) values[i] /= sum;
}

void Weigh(const RouterConfig& config, const float* probabilities, const int32_t* experts,
           float* weights) {
  float sum = 0;
  for (int i = 0; i < config.experts_per_token; ++i) {
    weights[i] = probabilities[experts[i]];
    sum += weights[i];
  }
  const float divisor = config.renormalize ? sum : 1.0f;
  for (int i = 0; i < config.experts_per_token; ++i) {
    weights[i] = weights[i] / divisor * config.routed_scale;
  }
}

float GroupBest(const RouterConfig& config, const float* probabilities, int group) {
  const int size = config.num_experts / config.num_groups;
  float best = probabilities[group * size];
  for (int i = 1; i < size; ++i) best = std::fmax(best, probabilities[group * size + i]);
  return best;
}

// Sets the probabilities of experts outside the best topk_groups groups to -1, below any other.
void HideOtherGroups(const RouterConfig& config, float* probabilities) {
  const int size = config.num_experts / config.num_groups;
  for (int shown = config.num_groups; shown > config.topk_groups; --shown) {
    // The worst group goes; among equals the last.
    int worst = -1;
    float worst_best = 0;
    for (int group = 0; group < config.num_groups; ++group) {
      const float best = GroupBest(config, probabilities, group);
      if (best < 0) continue;  // Hidden before.
      if (worst < 0 || !(best > worst_best)) {
        worst = group;
        worst_best = best;
      }
    }
    if (worst < 0) return;
    for (int i = 0; i < size; ++i) probabilities[worst * size + i] = -1;
  }
}

// The largest value whose index is not in `taken` yet.
int32_t Best(int count, const float* values, const int32_t* taken, int num_taken) {
  int32_t best = -1;
  for (int32_t i = 0; i < count; ++i) {
    // Only a strictly larger value replaces, so the lowest index wins.
    if (best >= 0 && !(values[i] > values[best]) &&
        !(std::isnan(values[best]) && !std::isnan(values[i]))) {
      continue;
    }
    bool is_taken = false;
    for (int j = 0; j < num_taken; ++j) is_taken |= taken[j] == i;
    if (!is_taken) best = i;
  }
  return best;
}

}  // namespace

void RouteToken(const RouterConfig& config, float* logits, int32_t* experts, float* weights) {
  Softmax(config.num_experts, logits);
  HideOtherGroups(config, logits);
  for (int i = 0; i < config.experts_per_token; ++i) {
    experts[i] = Best(config.num_experts, logits, experts, i);
  }
  Weigh(config, logits, experts, weights);
}

void WeighChosen(const RouterConfig& config, float* logits, const int32_t* experts,
                 float* weights) {
  Softmax(config.num_experts, logits);
  Weigh(config, logits, experts, weights);
}

}  // namespace writescope::kernels
