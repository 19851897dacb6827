// The end of attention that was staged: partials of a row become its output at once. No state is
// kept, since nothing else is seen. Nothing here is newer than sm_75.
#include <cuda_bf16.h>

#include "engine/kernels/cuda/attend_fold.h"
#include "engine/kernels/cuda/attend_launch.h"
#include "engine/kernels/cuda/launch.h"
#include "engine/kernels/cuda/values.h"

namespace writescope::kernels {
namespace {

constexpr int kMaxWarps = 16;
constexpr int kRangeDims = 128;  // Of a warp, 4 of a lane
constexpr int kAtOnce = 4;       // Slices whose loads are on their way together

// What a warp has added up of its slices, for its lanes' dims.
struct Sum {
  float m = kMinusInf;
  float l = 0;
  float4 o = {0, 0, 0, 0};

  __device__ void Add(float part_m, float part_l, const float4& part_o) {
    if (part_m == kMinusInf) return;  // Its values were not written.
    const float m_new = fmaxf(m, part_m);
    const float factor = exp2f(m - m_new);
    const float weight = exp2f(part_m - m_new);
    m = m_new;
    l = l * factor + weight * part_l;
    Scale(factor, &o);
    AddScaled(weight, part_o, &o);
  }
};

// A thread block takes one head of one row. The warps share out the dims, and what is left of them
// the slices: group g takes every num_groups-th from the g-th on, and the groups' sums are added in
// order.
template <typename Out>
__global__ void __launch_bounds__(kMaxWarps * 32) FinishRowsKernel(FinishCall call) {
  // The plan is older than the kernel before.
  const SliceSizes sizes = *call.staged;
  const SliceArrays arrays =
      FindSliceArrays(reinterpret_cast<const std::byte*>(call.staged + 1), sizes);
  const FoldRow fold = arrays.folds[blockIdx.x];
  const FoldPart* parts = arrays.parts + fold.first_part;
  const int kv_head = blockIdx.y / call.max_heads;
  const int head = blockIdx.y % call.max_heads;
  LetNextKernelBegin();
  WaitForKernelBefore();
  if (head >= fold.num_heads) return;

  __shared__ float group_o[kMaxWarps * kRangeDims];  // [num_groups][v_dim]
  __shared__ float group_m[kMaxWarps];
  __shared__ float group_l[kMaxWarps];
  const int v_dim = call.kv.v_dim;
  const int warp = threadIdx.x / 32;
  const int num_ranges = (v_dim + kRangeDims - 1) / kRangeDims;
  const int num_groups = blockDim.x / 32 / num_ranges;
  const int group = warp / num_ranges;
  const int dim = warp % num_ranges * kRangeDims + threadIdx.x % 32 * 4;
  const int64_t slice_stride = int64_t{call.kv.num_kv_heads} * sizes.num_slots;
  if (group < num_groups) {
    Sum sum;
    int skip = group;  // Slices until this group's next
    for (int p = 0; p < fold.num_parts; ++p) {
      const FoldPart part = parts[p];
      const int64_t first =
          (int64_t{part.first_slice} * call.kv.num_kv_heads + kv_head) * sizes.num_slots +
          part.first_slot + head;
      int s = skip;
      for (; s < part.num_slices; s += kAtOnce * num_groups) {
        float m[kAtOnce], l[kAtOnce];
        float4 o[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const bool inside = s + j * num_groups < part.num_slices;
          const int64_t at = first + (s + j * num_groups) * slice_stride;
          m[j] = inside ? call.partials.m[at] : kMinusInf;
          l[j] = inside ? call.partials.l[at] : 0;
          o[j] = inside && dim < v_dim
                     ? *reinterpret_cast<const float4*>(call.partials.o + at * v_dim + dim)
                     : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) sum.Add(m[j], l[j], o[j]);
      }
      // Of what a full round would have taken, the last may lie beyond the part.
      while (s - num_groups >= part.num_slices) s -= num_groups;
      skip = s - part.num_slices;
    }
    if (dim < v_dim) *reinterpret_cast<float4*>(group_o + group * v_dim + dim) = sum.o;
    group_m[group] = sum.m;  // The same for all lanes and ranges
    group_l[group] = sum.l;
  }
  __syncthreads();
  float m = kMinusInf;
  for (int g = 0; g < num_groups; ++g) m = fmaxf(m, group_m[g]);
  const float base = m == kMinusInf ? 0 : m;  // (-inf) - (-inf) would be NaN.
  float l = 0;
  for (int g = 0; g < num_groups; ++g) l += exp2f(group_m[g] - base) * group_l[g];
  const int heads = call.num_heads / call.kv.num_kv_heads;
  const int64_t at = int64_t{fold.row} * call.num_heads + kv_head * heads + fold.first_head + head;
  Out* out = static_cast<Out*>(call.out) + at * call.out_dim;
  for (int d = threadIdx.x; d < call.out_dim; d += blockDim.x) {
    float value = 0;
    for (int g = 0; g < num_groups; ++g) {
      value += exp2f(group_m[g] - base) * group_o[g * v_dim + d];
    }
    // Divided and not multiplied by the reciprocal: where l is 1 the values come out bit for bit.
    out[d] = FromFloat<Out>(l == 0 ? 0 : value / l);
  }
}

}  // namespace

cudaError_t LaunchFinishRows(cudaStream_t stream, const FinishCall& call) {
  // With many rows there are threads enough, and few slices to each.
  constexpr int kManyHeads = 256;
  const int heads = call.num_folds * call.kv.num_kv_heads * call.max_heads;
  const int warps = heads >= kManyHeads ? kMaxWarps / 2 : kMaxWarps;
  const dim3 grid(call.num_folds, call.kv.num_kv_heads * call.max_heads);
  const auto kernel = call.out_bf16 ? &FinishRowsKernel<__nv_bfloat16> : &FinishRowsKernel<float>;
  return LaunchEarly(stream, kernel, grid, warps * 32, 0, call);
}

}  // namespace writescope::kernels
