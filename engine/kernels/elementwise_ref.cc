#include <cmath>
#include <limits>

#include "engine/kernels/elementwise.h"

namespace writescope::kernels {

void RmsNormRowRef(int64_t dim, const float* x, const float* weight, float eps, double* out) {
  double sum = 0;
  for (int64_t d = 0; d < dim; ++d) sum += static_cast<double>(x[d]) * x[d];
  const double rms = std::sqrt(sum / static_cast<double>(dim) + eps);
  for (int64_t d = 0; d < dim; ++d) out[d] = x[d] / rms * weight[d];
}

void RopeRowRef(int64_t position, int half, const float* inv_freq, float scale, const float* x,
                double* out) {
  for (int i = 0; i < half; ++i) {
    const double angle = static_cast<float>(position) * inv_freq[i];
    const double c = std::cos(angle) * scale;
    const double s = std::sin(angle) * scale;
    out[i] = x[i] * c - x[i + half] * s;
    out[i + half] = x[i + half] * c + x[i] * s;
  }
}

void SwiGluRef(int64_t count, const float* gate, const float* up, double* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = gate[i] / (1.0 + std::exp(-static_cast<double>(gate[i]))) * up[i];
  }
}

RowMax MaxOfRowRef(int64_t dim, const float* x) {
  RowMax result = {.value = -std::numeric_limits<float>::infinity()};
  for (int64_t i = 0; i < dim; ++i) {
    if (std::isnan(x[i]) && result.first_nan < 0) result.first_nan = static_cast<int32_t>(i);
    if (x[i] > result.value) {
      result.value = x[i];
      result.index = static_cast<int32_t>(i);
    }
  }
  return result;
}

}  // namespace writescope::kernels
