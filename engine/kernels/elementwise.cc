#include "engine/kernels/elementwise.h"

#include <cmath>

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

void Bf16ToFloats(int64_t count, const std::byte* from, float* to) {
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
  for (int64_t i = 0; i < count; ++i) to[i] = Bf16ToFloat(bits[i]);
}

}  // namespace writescope::kernels
