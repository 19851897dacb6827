// How the products of few rows end, in either kernel. For .cu files only.
#pragma once

#include "engine/kernels/cuda/small_product.h"
#include "engine/kernels/cuda/values.h"

namespace writescope::kernels {

// Value `at` of y becomes alpha * value, or that is added to it. Rounded as it says here, and not
// as a compiler may join the two in one kernel and not in the other.
__device__ inline void StoreProduct(const SmallProductArgs& args, int64_t at, float value) {
  if (args.y_type == ValueType::kF32) {
    float* y = static_cast<float*>(args.y) + at;
    *y = args.accumulate ? __fmaf_rn(args.alpha, value, *y) : __fmul_rn(args.alpha, value);
  } else {
    __nv_bfloat16* y = static_cast<__nv_bfloat16*>(args.y) + at;
    *y = __float2bfloat16_rn(args.accumulate ? __fmaf_rn(args.alpha, value, ToFloat(*y))
                                             : __fmul_rn(args.alpha, value));
  }
}

}  // namespace writescope::kernels
