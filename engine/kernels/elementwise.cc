#include "engine/kernels/elementwise.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/base/bf16.h"

namespace writescope::kernels {

void RmsNormRow(int64_t dim, const float* x, const float* weight, float eps, float* out) {
  // Partial sums that the compiler may keep in vectors; a single one would be a chain of additions.
  constexpr int kPartials = 16;
  float partial[kPartials] = {};
  int64_t i = 0;
  for (; i + kPartials <= dim; i += kPartials) {
    for (int j = 0; j < kPartials; ++j) partial[j] += x[i + j] * x[i + j];
  }
  float sum = 0;
  for (; i < dim; ++i) sum += x[i] * x[i];
  for (const float value : partial) sum += value;
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(dim) + eps);
  for (int64_t d = 0; d < dim; ++d) out[d] = x[d] * factor * weight[d];
}

void RopeAngles(int64_t position, int half, const float* inv_freq, float scale, float* cos_out,
                float* sin_out) {
  for (int i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * inv_freq[i];
    cos_out[i] = std::cos(angle) * scale;
    sin_out[i] = std::sin(angle) * scale;
  }
}

void RopeRow(int half, const float* cos_values, const float* sin_values, float* x) {
  for (int i = 0; i < half; ++i) {
    const float first = x[i];
    const float second = x[i + half];
    x[i] = first * cos_values[i] - second * sin_values[i];
    x[i + half] = second * cos_values[i] + first * sin_values[i];
  }
}

void SwiGlu(int64_t count, const float* gate, const float* up, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

RowMax MaxOfRow(int64_t dim, const float* x) {
  // The largest of each block in lanes that a compiler turns into vector code: vocabularies are
  // large, and this runs for every sequence of every step.
  constexpr int64_t kBlock = 1024;
  constexpr int64_t kLanes = 16;
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  RowMax result = {.value = kMinusInfinity};
  int64_t best_block = 0;
  for (int64_t first = 0; first < dim; first += kBlock) {
    const float* block = x + first;
    const int64_t size = std::min(kBlock, dim - first);
    float lanes[kLanes];
    int nans[kLanes] = {};
    std::fill_n(lanes, kLanes, kMinusInfinity);
    const int64_t whole = size / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const float value = block[i + lane];
        lanes[lane] = value > lanes[lane] ? value : lanes[lane];
        nans[lane] += value != value;
      }
    }
    float largest = *std::max_element(lanes, lanes + kLanes);
    bool has_nan = std::any_of(nans, nans + kLanes, [](int count) { return count > 0; });
    for (int64_t i = whole; i < size; ++i) {
      largest = block[i] > largest ? block[i] : largest;
      has_nan |= std::isnan(block[i]);
    }
    if (has_nan && result.first_nan < 0) {
      const float* nan = std::find_if(block, block + size, [](float v) { return std::isnan(v); });
      result.first_nan = static_cast<int32_t>(nan - x);
    }
    if (largest > result.value) {
      result.value = largest;
      best_block = first;
    }
  }
  if (result.value == kMinusInfinity) return result;
  result.index = static_cast<int32_t>(std::find(x + best_block, x + dim, result.value) - x);
  return result;
}

void Bf16ToFloats(int64_t count, const std::byte* from, float* to) {
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
  for (int64_t i = 0; i < count; ++i) to[i] = Bf16ToFloat(bits[i]);
}

}  // namespace writescope::kernels
