#include "engine/kernels/int4_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/base/bf16.h"

namespace writescope::kernels {
namespace {

constexpr int kHalf = kInt4GroupCols / 2;

}  // namespace

void QuantizeInt4Row(int64_t cols, const float* w, std::byte* to) {
  for (int64_t first = 0; first < cols; first += kInt4GroupCols, to += kInt4RowGroupBytes) {
    const int64_t count = std::min<int64_t>(kInt4GroupCols, cols - first);
    float least = 0, most = 0;
    for (int64_t i = 0; i < count; ++i) {
      least = std::fmin(least, w[first + i]);
      most = std::fmax(most, w[first + i]);
    }
    const uint16_t scale = FloatToBf16(Int4Scale(least, most));
    uint8_t nibbles[kInt4GroupCols];
    for (int64_t i = 0; i < kInt4GroupCols; ++i) {
      const float value = i < count ? w[first + i] : 0.0f;
      nibbles[i] = static_cast<uint8_t>(Int4Quant(value, Bf16ToFloat(scale)) + kInt4Bias);
    }
    for (int i = 0; i < kHalf; ++i) {
      to[i] = static_cast<std::byte>(nibbles[i] | nibbles[i + kHalf] << 4);
    }
    std::memcpy(to + kHalf, &scale, sizeof(scale));
  }
}

void WidenInt4Row(const std::byte* row, int64_t first_col, int64_t cols, float* to) {
  const std::byte* group = row + first_col / kInt4GroupCols * kInt4RowGroupBytes;
  for (int64_t first = 0; first < cols; first += kInt4GroupCols, group += kInt4RowGroupBytes) {
    uint16_t bits = 0;
    std::memcpy(&bits, group + kHalf, sizeof(bits));
    const float scale = Bf16ToFloat(bits);
    // A product of a quant and a scale has 11 bits of fraction: float32 holds it.
    float values[kInt4GroupCols];
    for (int i = 0; i < kHalf; ++i) {
      const int quants = static_cast<int>(group[i]);
      values[i] = static_cast<float>((quants & 0xf) - kInt4Bias) * scale;
      values[i + kHalf] = static_cast<float>((quants >> 4) - kInt4Bias) * scale;
    }
    const int64_t count = std::min<int64_t>(kInt4GroupCols, cols - first);
    std::memcpy(to + first, values, static_cast<size_t>(count) * sizeof(float));
  }
}

}  // namespace writescope::kernels
