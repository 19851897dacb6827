// Which experts a token goes to, and with what weights.
#pragma once

#include <cstdint>

namespace writescope::kernels {

struct RouterConfig {
  int num_experts = 0;
  int experts_per_token = 0;
  bool renormalize = false;  // The chosen weights are divided by their sum.
  float routed_scale = 1;    // Multiplies the weights, last.
  int num_groups = 1;        // Divides num_experts; above 1 only experts of the topk_groups groups
  int topk_groups = 1;       // with the best single expert are eligible.
};

// Softmax of logits [num_experts] in float32, in place, then the experts_per_token largest. Among
// equals the lowest index wins. Experts come out by falling weight. A NaN counts as the smallest.
void RouteToken(const RouterConfig& config, float* logits, int32_t* experts, float* weights);

// The weights that RouteToken would give to experts chosen before.
void WeighChosen(const RouterConfig& config, float* logits, const int32_t* experts, float* weights);

// The twin of RouteToken: sorts all experts, in double.
void RouteTokenRef(const RouterConfig& config, const float* logits, int32_t* experts,
                   double* weights);

}  // namespace writescope::kernels
