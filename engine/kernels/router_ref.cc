#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "engine/kernels/router.h"

namespace writescope::kernels {

void RouteTokenRef(const RouterConfig& config, const float* logits, int32_t* experts,
                   double* weights) {
  const int n = config.num_experts;
  std::vector<double> p(n);
  const double maximum = *std::max_element(logits, logits + n);
  for (int i = 0; i < n; ++i) p[i] = std::exp(logits[i] - maximum);
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& value : p) value /= sum;

  const auto by_falling_value = [](const std::vector<double>& values) {
    std::vector<int> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return values[a] > values[b]; });
    return order;
  };
  const int group_size = n / config.num_groups;
  std::vector<double> group_best(config.num_groups);
  for (int g = 0; g < config.num_groups; ++g) {
    group_best[g] = *std::max_element(p.begin() + g * group_size, p.begin() + (g + 1) * group_size);
  }
  const std::vector<int> groups = by_falling_value(group_best);
  std::vector<double> eligible(n, -1.0);
  for (int g = 0; g < std::min(config.topk_groups, config.num_groups); ++g) {
    for (int i = 0; i < group_size; ++i) {
      eligible[groups[g] * group_size + i] = p[groups[g] * group_size + i];
    }
  }
  const std::vector<int> order = by_falling_value(eligible);
  double chosen = 0;
  for (int i = 0; i < config.experts_per_token; ++i) {
    experts[i] = order[i];
    chosen += p[order[i]];
  }
  for (int i = 0; i < config.experts_per_token; ++i) {
    weights[i] = p[experts[i]] / (config.renormalize ? chosen : 1.0) * config.routed_scale;
  }
}

}  // namespace writescope::kernels
