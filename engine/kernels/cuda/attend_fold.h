// Partials of a row folded into its state by the thread block that finished the last of them. Which
// one that is changes nothing: it adds them in the order of slices. Included by .cu files only;
// nothing here is newer than sm_75.
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

struct FoldShared {
  bool last[kPanelSlots];  // By row of the panel: all its slices are there.
  float m[kPanelSlots];    // By head
  float l[kPanelSlots];
};

// All heads of a fold, by all threads of the block.
__device__ inline void FoldHere(const SliceCall& call, const SliceArrays& arrays,
                                const FoldRow& fold, int kv_head, FoldShared& shared) {
  const KvGeometry& kv = call.rows.kv;
  const FoldPart* parts = arrays.parts + fold.first_part;
  const int64_t slice_stride = int64_t{kv.num_kv_heads} * call.sizes.num_slots;
  const int64_t first_state = FoldState(call, fold, kv_head);
  const int num_vecs = kv.v_dim / 4;
  for (int i = threadIdx.x; i < fold.num_heads * num_vecs; i += blockDim.x) {
    const int head = i / num_vecs;
    const int dim = i % num_vecs * 4;
    const int64_t at = first_state + head;
    float* state_o = call.rows.o + at * kv.v_dim + dim;
    float m = call.rows.m[at];
    float l = call.rows.l[at];
    float4 sum = make_float4(0, 0, 0, 0);
    if (m != kMinusInf) sum = *reinterpret_cast<const float4*>(state_o);
    for (int p = 0; p < fold.num_parts; ++p) {
      const int64_t first = PartialIndex(call, call.sizes, parts[p].first_slice, kv_head) +
                            parts[p].first_slot + head;
#pragma unroll 8
      for (int s = 0; s < parts[p].num_slices; ++s) {
        // Other multiprocessors wrote the partials: L1 may hold what was there before.
        const int64_t partial = first + s * slice_stride;
        const float part_m = __ldcg(call.partials.m + partial);
        const float part_l = __ldcg(call.partials.l + partial);
        const float4 part_o =
            __ldcg(reinterpret_cast<const float4*>(call.partials.o + partial * kv.v_dim + dim));
        if (part_m == kMinusInf) continue;
        const float m_new = fmaxf(m, part_m);
        const float factor = exp2f(m - m_new);
        const float weight = exp2f(part_m - m_new);
        m = m_new;
        l = l * factor + weight * part_l;
        Scale(factor, &sum);
        AddScaled(weight, part_o, &sum);
      }
    }
    *reinterpret_cast<float4*>(state_o) = sum;
    if (dim == 0) {
      shared.m[head] = m;
      shared.l[head] = l;
    }
  }
  __syncthreads();  // Every thread has read the old maxima.
  for (int head = threadIdx.x; head < fold.num_heads; head += blockDim.x) {
    call.rows.m[first_state + head] = shared.m[head];
    call.rows.l[first_state + head] = shared.l[head];
  }
  __syncthreads();
}

// After all threads of the block have stored the slice's partial: folds the rows for which that was
// the last one.
__device__ inline void FinishSlice(const SliceCall& call, const SliceArrays& arrays,
                                   const Slice& slice, int kv_head, FoldShared& shared) {
  if (call.arrivals == nullptr) return;
  __threadfence();
  __syncthreads();
  const FoldRow* folds = arrays.folds;
  const int num_rows = slice.panel->num_rows;
  if (static_cast<int>(threadIdx.x) < num_rows) {
    const int fold = slice.rows[threadIdx.x].fold;
    uint32_t* arrivals = call.arrivals + fold * call.rows.kv.num_kv_heads + kv_head;
    const bool last = atomicAdd(arrivals, 1u) + 1 == static_cast<uint32_t>(folds[fold].num_slices);
    if (last) *arrivals = 0;
    shared.last[threadIdx.x] = last;
  }
  __syncthreads();
  __threadfence();
  for (int row = 0; row < num_rows; ++row) {
    if (shared.last[row]) FoldHere(call, arrays, folds[slice.rows[row].fold], kv_head, shared);
  }
}

}  // namespace writescope::kernels
