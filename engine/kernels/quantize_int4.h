// Matrices of 4-bit weights: the format, and its plain twin.
//
// 128 neighbouring values of a row are a group with one scale; w = q * scale, q in [-8, 7]. The
// value of largest magnitude becomes -8, so a scale may be negative: of normal weights the error is
// 12 % less than with q from -7 to 7. Rows are padded to tiles of 16, columns to groups, with q =
// 0.
//   quants: [row tiles][groups][2 halves of 64 columns][32 lanes][4 words], 8 values to a word
//   scales: [row tiles][groups][8][2] bf16: of rows g and g + 8
// A lane's 16 bytes are its A fragments of four mma.m16n8k16. So that the other operand is read 16
// bytes at a time too, the columns of 32 are dealt out anew: lane 4g + t has columns 8t to 8t + 7.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "engine/base/bf16.h"
#include "engine/base/tile_layout.h"

namespace writescope::kernels {

inline constexpr int kInt4GroupCols = 128;
inline constexpr int kInt4TileRows = 16;
inline constexpr int kInt4GroupWords = kInt4TileRows * kInt4GroupCols / 8;  // Of a row tile
inline constexpr int kInt4Min = -8, kInt4Max = 7;
inline constexpr int kInt4Bias = 8;  // A nibble is q + 8.

WRITESCOPE_HOST_DEVICE constexpr int64_t Int4RowTiles(int64_t rows) {
  return (rows + kInt4TileRows - 1) / kInt4TileRows;
}
WRITESCOPE_HOST_DEVICE constexpr int64_t Int4Groups(int64_t cols) {
  return (cols + kInt4GroupCols - 1) / kInt4GroupCols;
}
WRITESCOPE_HOST_DEVICE constexpr int64_t Int4QuantBytes(int64_t rows, int64_t cols) {
  return Int4RowTiles(rows) * Int4Groups(cols) * kInt4GroupWords * 4;
}
WRITESCOPE_HOST_DEVICE constexpr int64_t Int4Bytes(int64_t rows, int64_t cols) {
  return Int4QuantBytes(rows, cols) + Int4RowTiles(rows) * Int4Groups(cols) * kInt4TileRows * 2;
}

// Row (in the tile) and column (in the group) of nibble `nibble` in word `word` of a tile's group.
// Nibble i < 4 is the low half of fragment register i, nibble i + 4 its high half.
WRITESCOPE_HOST_DEVICE constexpr int Int4Row(int word, int nibble) {
  const int lane = word / 4 % 32;
  return lane / 4 + 8 * (nibble & 1);
}
WRITESCOPE_HOST_DEVICE constexpr int Int4Col(int word, int nibble) {
  const int half = word / 128, lane = word / 4 % 32, step = word % 4;
  return 64 * half + 32 * (step / 2) + 8 * (lane % 4) + 4 * (step % 2) + (nibble & 2) + nibble / 4;
}
// Where a column lies among dealt values: the order of k in which the fragments of a row tile meet
// the other operand, where that is read from shared memory by the tensor cores themselves.
WRITESCOPE_HOST_DEVICE constexpr int64_t DealtColumn(int64_t col) {
  return col / 32 * 32 + col % 8 / 4 * 16 + col % 4 / 2 * 8 + col % 32 / 8 * 2 + col % 2;
}
// Where the scale of a row of the tile lies among the 16 of a group.
WRITESCOPE_HOST_DEVICE constexpr int Int4ScaleIndex(int row) { return row % 8 * 2 + row / 8; }

// The scale of a group, before it is rounded to bf16, by its least and its largest value (0 among
// them); of two equal magnitudes the positive one counts.
WRITESCOPE_HOST_DEVICE constexpr float Int4Scale(float least, float most) {
  const float scale = (most >= -least ? most : least) / kInt4Min;
  return scale == 0 ? 0.0f : scale;  // Not -0, whatever zeros there were.
}
// The quant of a value under its rounded scale: the quotient in float32, rounded to the nearest,
// ties to even.
inline int Int4Quant(float w, float scale) {
  if (scale == 0) return 0;
  return static_cast<int>(std::clamp<float>(std::nearbyint(w / scale), kInt4Min, kInt4Max));
}

// Row-major w [rows, cols] into Int4Bytes(rows, cols) bytes.
void QuantizeInt4(int64_t rows, int64_t cols, const float* w, std::byte* to);
// The values that the quants stand for, exactly: [rows, cols].
void DequantizeInt4(int64_t rows, int64_t cols, const std::byte* from, double* to);

}  // namespace writescope::kernels
