// Folds: where their states lie, and sums of partials. Included by .cu files only; nothing here is
// newer than sm_75.
#pragma once

#include "engine/kernels/cuda/attend_slices.h"

namespace writescope::kernels {

// The state of the fold's first head, of rows x heads.
__device__ inline int64_t FoldState(const SliceCall& call, const FoldRow& fold, int kv_head) {
  const int group = call.rows.num_heads / call.rows.kv.num_kv_heads;
  return int64_t{fold.row} * call.rows.num_heads + kv_head * group + fold.first_head;
}

__device__ inline void AddScaled(float weight, const float4& from, float4* to) {
  to->x += weight * from.x;
  to->y += weight * from.y;
  to->z += weight * from.z;
  to->w += weight * from.w;
}

__device__ inline void Scale(float factor, float4* value) {
  value->x *= factor;
  value->y *= factor;
  value->z *= factor;
  value->w *= factor;
}

}  // namespace writescope::kernels
