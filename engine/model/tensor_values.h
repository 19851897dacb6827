// The values of a float tensor, whatever its dtype and alignment. Pure; any thread.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "engine/model/safetensors.h"

namespace writescope::model {

// BF16, F16 and F32: what the functions below take.
bool IsWeightDtype(Dtype dtype);

// Converts out.size() elements from element `first` on. Exact.
void ReadAsFloat(const TensorView& tensor, int64_t first, std::span<float> out);

// The same to bf16 bits: BF16 is copied, F16 and F32 are rounded to nearest, ties to even.
void ReadAsBf16(const TensorView& tensor, int64_t first, std::span<uint16_t> out);

// InvalidArgument names the first NaN or infinity: the tensor, its index and the value. One pass,
// at the speed of memory.
absl::Status CheckTensorFinite(const TensorView& tensor);

}  // namespace writescope::model
