// How the products of few rows end, in either kernel. For .cu files only.
#pragma once

#include "engine/kernels/cuda/small_product.h"
#include "engine/kernels/cuda/values.h"

namespace writescope::kernels {

// What is added to: value `at` of y, or nothing.
__device__ inline float ValueBefore(const SmallProductArgs& args, int64_t at) {
  if (!args.accumulate) return 0;
  return args.y_type == ValueType::kF32 ? static_cast<const float*>(args.y)[at]
                                        : ToFloat(static_cast<const __nv_bfloat16*>(args.y)[at]);
}

// Value `at` of y becomes alpha * value, or that is added to what was there `before`. Rounded as it
// says here, and not as a compiler may join the two in one kernel and not in the other.
__device__ inline void StoreProduct(const SmallProductArgs& args, int64_t at, float value,
                                    float before) {
  const float sum =
      args.accumulate ? __fmaf_rn(args.alpha, value, before) : __fmul_rn(args.alpha, value);
  if (args.y_type == ValueType::kF32) {
    static_cast<float*>(args.y)[at] = sum;
  } else {
    static_cast<__nv_bfloat16*>(args.y)[at] = __float2bfloat16_rn(sum);
  }
}

}  // namespace writescope::kernels
