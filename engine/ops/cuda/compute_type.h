// The type of activations and of matrix products on the GPU.
#pragma once

namespace writescope::ops {

// kF32 multiplies in float32 (no tf32) and keeps float32 activations; weights are widened. kBf16
// multiplies bf16 by bf16 into float32 and keeps bf16 activations; float32 weights are rounded.
enum class ComputeType { kF32, kBf16 };

inline int ActivationBytes(ComputeType type) { return type == ComputeType::kF32 ? 4 : 2; }

}  // namespace writescope::ops
