#include "engine/kernels/quantize_int4.h"

#include <algorithm>
#include <cmath>

#include "engine/base/bf16.h"

namespace writescope::kernels {
namespace {

// body(word, nibble, row, col, scale index) for each nibble of the padded matrix; row and col may
// lie in the padding.
template <typename Body>
void ForEachNibble(int64_t rows, int64_t cols, const Body& body) {
  const int64_t groups = Int4Groups(cols);
  for (int64_t tile = 0; tile < Int4RowTiles(rows); ++tile) {
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t block = tile * groups + group;
      for (int word = 0; word < kInt4GroupWords; ++word) {
        for (int nibble = 0; nibble < 8; ++nibble) {
          const int row = Int4Row(word, nibble);
          body(block * kInt4GroupWords + word, nibble, tile * kInt4TileRows + row,
               group * kInt4GroupCols + Int4Col(word, nibble),
               block * kInt4TileRows + Int4ScaleIndex(row));
        }
      }
    }
  }
}

}  // namespace

void QuantizeInt4(int64_t rows, int64_t cols, const float* w, std::byte* to) {
  const int64_t groups = Int4Groups(cols);
  uint32_t* words = reinterpret_cast<uint32_t*>(to);
  uint16_t* scales = reinterpret_cast<uint16_t*>(to + Int4QuantBytes(rows, cols));
  std::fill_n(to, Int4Bytes(rows, cols), std::byte{0});
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      float least = 0, most = 0;
      const int64_t end = std::min(cols, (group + 1) * kInt4GroupCols);
      for (int64_t col = group * kInt4GroupCols; col < end; ++col) {
        least = std::fmin(least, w[row * cols + col]);
        most = std::fmax(most, w[row * cols + col]);
      }
      const int64_t block = row / kInt4TileRows * groups + group;
      scales[block * kInt4TileRows + Int4ScaleIndex(static_cast<int>(row % kInt4TileRows))] =
          FloatToBf16(Int4Scale(least, most));
    }
  }
  ForEachNibble(rows, cols, [&](int64_t word, int nibble, int64_t row, int64_t col, int64_t at) {
    const bool inside = row < rows && col < cols;
    const int q = inside ? Int4Quant(w[row * cols + col], Bf16ToFloat(scales[at])) : 0;
    words[word] |= static_cast<uint32_t>(q + kInt4Bias) << (4 * nibble);
  });
}

void DequantizeInt4(int64_t rows, int64_t cols, const std::byte* from, double* to) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(from);
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(from + Int4QuantBytes(rows, cols));
  ForEachNibble(rows, cols, [&](int64_t word, int nibble, int64_t row, int64_t col, int64_t at) {
    if (row >= rows || col >= cols) return;
    const int q = static_cast<int>(words[word] >> (4 * nibble) & 0xf) - kInt4Bias;
    to[row * cols + col] = q * static_cast<double>(Bf16ToFloat(scales[at]));
  });
}

}  // namespace writescope::kernels
