// Weights for models without a checkpoint: a function of seed and index, so that every device makes
// the same values, in any order.
#pragma once

#include <cstdint>

#include "engine/base/tile_layout.h"

namespace writescope::kernels {

// About N(0, sigma^2), and never beyond 3.5 sigma: four uniform 16-bit numbers, added and centred.
// All steps but the last product are exact in float32, so the value is the same everywhere.
WRITESCOPE_HOST_DEVICE constexpr float RandomWeight(uint64_t seed, uint64_t index, float sigma) {
  // splitmix64 of seed and index.
  uint64_t bits = seed * 0xd1342543de82ef95u + (index + 1) * 0x9e3779b97f4a7c15u;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  bits ^= bits >> 31;
  const int32_t sum = static_cast<int32_t>((bits & 0xffff) + ((bits >> 16) & 0xffff) +
                                           ((bits >> 32) & 0xffff) + (bits >> 48));
  // The sum has mean 2 * 65535 and variance 4 * (2^32 - 1) / 12.
  constexpr float kUnit = 2.64291e-5f;  // 1 / sqrt(variance)
  return static_cast<float>(sum - 2 * 65535) * (kUnit * sigma);
}

}  // namespace writescope::kernels
