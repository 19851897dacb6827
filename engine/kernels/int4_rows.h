// Matrices of 4-bit weights as the CPU reads them: the values of quantize_int4.h, bit for bit, laid
// out row by row.
//
// A row is its groups, each 66 bytes: 64 of quants, value i of the group in the low half of byte i
// and value i + 64 in the high half, so that neighbours widen to neighbours; then the scale, bf16.
// The last group is padded with q = 0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/kernels/quantize_int4.h"

namespace writescope::kernels {

inline constexpr int64_t kInt4RowGroupBytes = kInt4GroupCols / 2 + 2;

constexpr int64_t Int4RowBytes(int64_t cols) { return Int4Groups(cols) * kInt4RowGroupBytes; }

// w [cols] into Int4RowBytes(cols) bytes.
void QuantizeInt4Row(int64_t cols, const float* w, std::byte* to);

// Columns first_col to first_col + cols of a row into to [cols]; exact. first_col is a multiple of
// kInt4GroupCols.
void WidenInt4Row(const std::byte* row, int64_t first_col, int64_t cols, float* to);

}  // namespace writescope::kernels
