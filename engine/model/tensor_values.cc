#include "engine/model/tensor_values.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/bf16.h"
#include "engine/base/check.h"

namespace writescope::model {
namespace {

float HalfToFloat(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = (bits >> 10) & 0x1f;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 0) {  // Zero or subnormal: mantissa * 2^-24, exact in f32.
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 127 - 15) << 23) | (mantissa << 13));
}

// Loads element i of an array that may be unaligned.
template <typename T>
T Load(const std::byte* data, int64_t i) {
  T value;
  std::memcpy(&value, data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// First element whose exponent bits are all set, or -1. Looks at a chunk as a whole before at its
// elements, since a chunk without a branch is what the compiler makes vector code of.
template <typename T>
int64_t FindNonFinite(std::span<const std::byte> bytes, T exponent_mask) {
  constexpr int64_t kChunk = 4096;
  const int64_t count = static_cast<int64_t>(bytes.size() / sizeof(T));
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t end = std::min(count, begin + kChunk);
    T found = 0;
    for (int64_t i = begin; i < end; ++i) {
      const T bits = Load<T>(bytes.data(), i);
      found |= static_cast<T>((bits & exponent_mask) == exponent_mask);
    }
    if (found == 0) continue;
    for (int64_t i = begin; i < end; ++i) {
      if ((Load<T>(bytes.data(), i) & exponent_mask) == exponent_mask) return i;
    }
  }
  return -1;
}

std::string IndexString(int64_t element, const std::vector<int64_t>& shape) {
  std::vector<int64_t> index(shape.size());
  for (size_t d = shape.size(); d-- > 0;) {
    index[d] = element % shape[d];
    element /= shape[d];
  }
  return absl::StrCat("[", absl::StrJoin(index, ", "), "]");
}

void CheckRange(const TensorView& tensor, int64_t first, size_t count) {
  CHECK(IsWeightDtype(tensor.dtype)) << tensor.name << " is " << DtypeName(tensor.dtype);
  CHECK(first >= 0 && static_cast<int64_t>(count) <= tensor.num_elements() - first)
      << tensor.name << ": elements " << first << " to " << first + static_cast<int64_t>(count)
      << " of " << tensor.num_elements();
}

}  // namespace

bool IsWeightDtype(Dtype dtype) {
  return dtype == Dtype::kBF16 || dtype == Dtype::kF16 || dtype == Dtype::kF32;
}

void ReadAsFloat(const TensorView& tensor, int64_t first, std::span<float> out) {
  CheckRange(tensor, first, out.size());
  const std::byte* data = tensor.bytes.data() + first * DtypeBytes(tensor.dtype);
  const int64_t count = std::ssize(out);
  if (tensor.dtype == Dtype::kF32) {
    if (count > 0) std::memcpy(out.data(), data, out.size_bytes());
  } else if (tensor.dtype == Dtype::kBF16) {
    for (int64_t i = 0; i < count; ++i) out[i] = Bf16ToFloat(Load<uint16_t>(data, i));
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = HalfToFloat(Load<uint16_t>(data, i));
  }
}

void ReadAsBf16(const TensorView& tensor, int64_t first, std::span<uint16_t> out) {
  CheckRange(tensor, first, out.size());
  const std::byte* data = tensor.bytes.data() + first * DtypeBytes(tensor.dtype);
  const int64_t count = std::ssize(out);
  if (tensor.dtype == Dtype::kBF16) {
    if (count > 0) std::memcpy(out.data(), data, out.size_bytes());
  } else if (tensor.dtype == Dtype::kF32) {
    for (int64_t i = 0; i < count; ++i) out[i] = FloatToBf16(Load<float>(data, i));
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = FloatToBf16(HalfToFloat(Load<uint16_t>(data, i)));
  }
}

absl::Status CheckTensorFinite(const TensorView& tensor) {
  CHECK(IsWeightDtype(tensor.dtype)) << tensor.name << " is " << DtypeName(tensor.dtype);
  int64_t bad = -1;
  switch (tensor.dtype) {
    case Dtype::kBF16:
      bad = FindNonFinite<uint16_t>(tensor.bytes, 0x7f80);
      break;
    case Dtype::kF16:
      bad = FindNonFinite<uint16_t>(tensor.bytes, 0x7c00);
      break;
    default:
      bad = FindNonFinite<uint32_t>(tensor.bytes, 0x7f800000u);
      break;
  }
  if (bad < 0) return absl::OkStatus();
  float value = 0;
  ReadAsFloat(tensor, bad, {&value, 1});
  return absl::InvalidArgumentError(absl::StrCat("weight ", tensor.name, " is ",
                                                 std::isnan(value) ? "NaN" : "infinite", " at ",
                                                 IndexString(bad, tensor.shape)));
}

}  // namespace writescope::model
