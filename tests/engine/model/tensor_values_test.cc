// Conversion of weights and the search for NaN and infinity, at every dtype and alignment.
#include "engine/model/tensor_values.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/bf16.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/safetensors_writer.h"

namespace writescope::model {
namespace {

using testing::HasSubstr;
using testing_support::FloatTensor;

// A view of values that starts at an odd address.
struct Unaligned {
  Unaligned(Dtype dtype, std::vector<int64_t> shape, const std::string& values)
      : storage("x" + values) {
    view.dtype = dtype;
    view.shape = std::move(shape);
    view.name = "w";
    view.bytes = std::as_bytes(std::span(storage)).subspan(1);
  }
  std::string storage;
  TensorView view;
};

std::string HalfBytes(const std::vector<uint16_t>& bits) {
  return std::string(reinterpret_cast<const char*>(bits.data()), bits.size() * 2);
}

TEST(TensorValues, ReadsEveryDtype) {
  const std::vector<float> values{0, -0.0f, 1, -2.5f, 3.0e38f, 0x1p-130f, 0.1f};
  const Unaligned f32(Dtype::kF32, {7}, FloatTensor("w", "F32", {7}, values).bytes);
  std::vector<float> floats(7);
  ReadAsFloat(f32.view, 0, floats);
  EXPECT_EQ(std::memcmp(floats.data(), values.data(), sizeof(float) * 7), 0);

  const Unaligned bf16(Dtype::kBF16, {7}, FloatTensor("w", "BF16", {7}, values).bytes);
  std::vector<uint16_t> from_f32(7);
  std::vector<uint16_t> from_bf16(7);
  ReadAsBf16(f32.view, 0, from_f32);
  ReadAsBf16(bf16.view, 0, from_bf16);
  EXPECT_EQ(from_f32, from_bf16);
  ReadAsFloat(bf16.view, 0, floats);
  for (int i = 0; i < 7; ++i) EXPECT_EQ(floats[i], Bf16ToFloat(FloatToBf16(values[i])));

  std::vector<float> tail(2);
  ReadAsFloat(f32.view, 5, tail);
  EXPECT_EQ(tail, (std::vector<float>{0x1p-130f, 0.1f}));
}

TEST(TensorValues, ReadsHalf) {
  // 1, -2, the largest, the smallest normal, the largest and the smallest subnormal, both zeros.
  const std::vector<uint16_t> bits{0x3c00, 0xc000, 0x7bff, 0x0400, 0x03ff, 0x8001, 0x0000, 0x8000};
  const std::vector<float> want{1, -2, 65504, 0x1p-14f, 1023 * 0x1p-24f, -0x1p-24f, 0, -0.0f};
  const Unaligned f16(Dtype::kF16, {8}, HalfBytes(bits));
  std::vector<float> floats(8);
  ReadAsFloat(f16.view, 0, floats);
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(floats[i], want[i]) << i;
    EXPECT_EQ(std::signbit(floats[i]), std::signbit(want[i])) << i;
  }
  std::vector<uint16_t> bf16(8);
  ReadAsBf16(f16.view, 0, bf16);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(bf16[i], FloatToBf16(want[i])) << i;
  EXPECT_TRUE(CheckTensorFinite(f16.view).ok());
}

TEST(TensorValues, EmptyTensor) {
  const Unaligned none(Dtype::kBF16, {0, 4}, "");
  EXPECT_TRUE(CheckTensorFinite(none.view).ok());
  ReadAsFloat(none.view, 0, {});
}

TEST(CheckTensorFinite, FindsTheFirstAtEveryPlace) {
  // Sizes around the chunk of 4096 that is looked at as one.
  constexpr int64_t kRows = 3;
  constexpr int64_t kCols = 2732;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const char* dtype : {"F32", "BF16"}) {
    for (const int64_t at :
         {int64_t{0}, int64_t{1}, int64_t{4095}, int64_t{4096}, kRows * kCols - 1}) {
      for (const float bad : {nan, infinity, -infinity}) {
        std::vector<float> values(kRows * kCols, 3.3e38f);  // The largest exponent that is finite.
        values[at] = bad;
        values.back() = bad;
        const Unaligned tensor(*ParseDtype(dtype), {kRows, kCols},
                               FloatTensor("w", dtype, {kRows, kCols}, values).bytes);
        const absl::Status status = CheckTensorFinite(tensor.view);
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
        const std::string index =
            "[" + std::to_string(at / kCols) + ", " + std::to_string(at % kCols) + "]";
        EXPECT_THAT(std::string(status.message()), HasSubstr("weight w is "));
        EXPECT_THAT(std::string(status.message()), HasSubstr(index));
        EXPECT_THAT(std::string(status.message()), HasSubstr(std::isnan(bad) ? "NaN" : "infinite"));
      }
    }
    const std::vector<float> fine(kRows * kCols, 3.3e38f);
    const Unaligned tensor(*ParseDtype(dtype), {kRows, kCols},
                           FloatTensor("w", dtype, {kRows, kCols}, fine).bytes);
    EXPECT_TRUE(CheckTensorFinite(tensor.view).ok());
  }
  const Unaligned half(Dtype::kF16, {3}, HalfBytes({0x3c00, 0x7c00, 0x7e00}));
  EXPECT_THAT(std::string(CheckTensorFinite(half.view).message()), HasSubstr("infinite at [1]"));
}

TEST(TensorValuesDeathTest, RangeOutsideTheTensor) {
  const Unaligned tensor(Dtype::kF32, {2},
                         FloatTensor("w", "F32", {2}, std::vector<float>{1, 2}).bytes);
  std::vector<float> out(2);
  EXPECT_DEATH(ReadAsFloat(tensor.view, 1, out), "elements 1 to 3 of 2");
}

}  // namespace
}  // namespace writescope::model
