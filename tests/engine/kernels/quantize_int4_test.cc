#include "engine/kernels/quantize_int4.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "engine/base/bf16.h"
#include "engine/kernels/int4_rows.h"
#include "tests/support/seed.h"

namespace writescope::kernels {
namespace {

std::vector<double> RoundTrip(int64_t rows, int64_t cols, const std::vector<float>& w) {
  std::vector<std::byte> packed(Int4Bytes(rows, cols));
  QuantizeInt4(rows, cols, w.data(), packed.data());
  std::vector<double> values(rows * cols);
  DequantizeInt4(rows, cols, packed.data(), values.data());
  return values;
}

TEST(QuantizeInt4, MapsEachNibbleOfAGroupToItsOwnPlace) {
  std::set<std::pair<int, int>> places;
  for (int word = 0; word < kInt4GroupWords; ++word) {
    for (int nibble = 0; nibble < 8; ++nibble) {
      const int row = Int4Row(word, nibble), col = Int4Col(word, nibble);
      ASSERT_TRUE(row >= 0 && row < kInt4TileRows && col >= 0 && col < kInt4GroupCols);
      places.insert({row, col});
    }
  }
  EXPECT_EQ(places.size(), static_cast<size_t>(kInt4TileRows * kInt4GroupCols));
}

// What the tensor core needs: register i of lane 4g + t is of rows g (i even) and g + 8 (i odd),
// its halves are neighbouring columns, and registers 0 and 2 of a step are the 4 columns that the
// other operand holds at this step.
TEST(QuantizeInt4, LaneHoldsItsOperand) {
  for (int word = 0; word < kInt4GroupWords; ++word) {
    const int lane = word / 4 % 32, step = word % 4, half = word / 128;
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(Int4Row(word, i), lane / 4 + 8 * (i % 2));
      EXPECT_EQ(Int4Row(word, i + 4), Int4Row(word, i));
      EXPECT_EQ(Int4Col(word, i + 4), Int4Col(word, i) + 1);
      EXPECT_EQ(Int4Col(word, i),
                64 * half + step / 2 * 32 + lane % 4 * 8 + step % 2 * 4 + i / 2 * 2);
    }
  }
}

// The product of a warpgroup reads its other operand in the order of k; register i of lane 4g + t
// has k = 2t, from 8 on in registers 2 and 3, and the next k in its high half.
TEST(QuantizeInt4, DealtColumnsLieInTheOrderOfTheProduct) {
  for (int word = 0; word < kInt4GroupWords; ++word) {
    const int lane = word / 4 % 32, product = word / 128 * 4 + word % 4;
    for (int nibble = 0; nibble < 8; ++nibble) {
      const int k = nibble % 4 / 2 * 8 + lane % 4 * 2 + nibble / 4;
      EXPECT_EQ(DealtColumn(Int4Col(word, nibble)), 16 * product + k);
    }
  }
  EXPECT_EQ(DealtColumn(5 * kInt4GroupCols + 7), 5 * kInt4GroupCols + DealtColumn(7));
}

TEST(QuantizeInt4, IsWithinHalfAStep) {
  std::mt19937_64 rng(testing_support::TestSeed());
  std::normal_distribution<float> normal(0, 0.05f);
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{1, 1}, {16, 128}, {17, 129}, {5, 300}, {48, 64}, {33, 1000}}) {
    std::vector<float> w(rows * cols);
    for (float& value : w) value = normal(rng);
    const std::vector<double> got = RoundTrip(rows, cols, w);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t first = 0; first < cols; first += kInt4GroupCols) {
        const int64_t last = std::min(cols, first + kInt4GroupCols);
        float max_abs = 0;
        for (int64_t c = first; c < last; ++c) {
          max_abs = std::max(max_abs, std::abs(w[row * cols + c]));
        }
        // Half a step, the scale's own rounding at the ends, and half a step more at the end that
        // has no -8.
        const double step = max_abs / 8;
        for (int64_t c = first; c < last; ++c) {
          const double bound =
              step * (std::abs(w[row * cols + c]) > 7 * step ? 1.05 : 0.5 + 8.0 / 256);
          ASSERT_NEAR(got[row * cols + c], w[row * cols + c], bound) << row << ", " << c;
        }
      }
    }
  }
}

TEST(QuantizeInt4, KeepsWhatItCanRepresent) {
  // Every quant under its own scale for each row and group: a swapped nibble or scale shows.
  constexpr int64_t kRows = 35, kCols = 2 * kInt4GroupCols + 9;
  std::vector<float> w(kRows * kCols);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t col = 0; col < kCols; ++col) {
      const float sign = row % 2 == 0 ? 1 : -1;
      const float scale = sign * std::ldexp(1.0f + static_cast<float>(row % 16) / 16,
                                            static_cast<int>(col / kInt4GroupCols) - 3);
      const int64_t q = (col % kInt4GroupCols == 0) ? -8 : (col * 5 + row * 3) % 16 - 8;
      w[row * kCols + col] = scale * static_cast<float>(q);
    }
  }
  const std::vector<double> got = RoundTrip(kRows, kCols, w);
  for (size_t i = 0; i < w.size(); ++i) ASSERT_EQ(got[i], w[i]) << i;
}

// The two layouts hold the same values, to the bit; parts of a row too.
TEST(Int4Rows, HoldTheValuesOfTheTiles) {
  std::mt19937_64 rng(testing_support::TestSeed());
  std::normal_distribution<float> normal(0, 0.05f);
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{1, 1}, {3, 64}, {16, 128}, {17, 129}, {5, 300}, {33, 1000}}) {
    std::vector<float> w(rows * cols);
    for (float& value : w) value = normal(rng);
    const std::vector<double> want = RoundTrip(rows, cols, w);
    std::vector<std::byte> packed(Int4RowBytes(cols));
    for (int64_t row = 0; row < rows; ++row) {
      QuantizeInt4Row(cols, w.data() + row * cols, packed.data());
      for (int64_t first = 0; first < cols; first += kInt4GroupCols) {
        std::vector<float> got(cols - first, NAN);
        WidenInt4Row(packed.data(), first, cols - first, got.data());
        for (int64_t col = first; col < cols; ++col) {
          ASSERT_EQ(got[col - first], want[row * cols + col]) << row << ", " << col;
        }
      }
    }
  }
}

TEST(QuantizeInt4, GroupsOfZerosAndOfTinyValuesStayFinite) {
  std::vector<float> w(2 * kInt4GroupCols, 0.0f);
  std::fill(w.begin() + kInt4GroupCols, w.end(), 1e-44f);
  const std::vector<double> got = RoundTrip(2, kInt4GroupCols, w);
  for (int64_t i = 0; i < kInt4GroupCols; ++i) ASSERT_EQ(got[i], 0);
  for (const double value : got) ASSERT_LT(std::abs(value), 1e-38);
}

}  // namespace
}  // namespace writescope::kernels
