// The type of activations in a launch.
#pragma once

namespace writescope::kernels {

enum class ValueType { kF32, kBf16 };

constexpr int ValueBytes(ValueType type) { return type == ValueType::kF32 ? 4 : 2; }

}  // namespace writescope::kernels
