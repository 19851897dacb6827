// States of rows: empty, folded with partials, finished. Nothing here is newer than sm_75.
#include <cuda_bf16.h>

#include "engine/kernels/cuda/attend_launch.h"
#include "engine/kernels/cuda/attend_slices.h"

namespace writescope::kernels {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

__global__ void StageArraysKernel(const uint32_t* from, uint32_t* to, int64_t num_words) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < num_words;
       i += int64_t{gridDim.x} * kThreads) {
    to[i] = from[i];
  }
}

__global__ void ResetStatesKernel(int64_t count, int v_dim, float* o, float* m, float* l) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  const int64_t first = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  for (int64_t i = first; i < count; i += stride) {
    m[i] = kMinusInf;
    l[i] = 0;
  }
  // v_dim is a multiple of 32.
  float4* o4 = reinterpret_cast<float4*>(o);
  for (int64_t i = first; i < count * v_dim / 4; i += stride) o4[i] = make_float4(0, 0, 0, 0);
}

// Of the threads of a block.
__device__ float MaxOfBlock(float value, float* shared) {
  for (int step = 16; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) value = fmaxf(value, shared[w]);
  return value;
}

// A thread block folds one row of one head: warp w takes every kWarps-th slice from the w-th on,
// and the warps' sums are added in order.
__global__ void __launch_bounds__(kThreads)
    FoldPartialsKernel(const __grid_constant__ SliceCall call) {
  const SliceSizes& sizes = call.sizes;
  if (static_cast<int>(blockIdx.x) >= sizes.num_folds) return;
  const SliceArrays arrays = ArraysOf(call);
  const FoldRow fold = arrays.folds[blockIdx.x];
  const KvGeometry& kv = call.rows.kv;
  const int kv_head = blockIdx.y / kPanelSlots;
  const int head = blockIdx.y % kPanelSlots;
  if (head >= fold.num_heads) return;
  const int group = call.rows.num_heads / kv.num_kv_heads;
  const int64_t at =
      int64_t{fold.row} * call.rows.num_heads + kv_head * group + fold.first_head + head;
  const FoldPart* parts = arrays.parts + fold.first_part;
  const int64_t slice_stride = int64_t{kv.num_kv_heads} * sizes.num_slots;

  __shared__ float warp_max[kWarps];
  float best = kMinusInf;
  for (int p = 0; p < fold.num_parts; ++p) {
    const int64_t first =
        PartialIndex(call, parts[p].first_slice, kv_head) + parts[p].first_slot + head;
    for (int s = threadIdx.x; s < parts[p].num_slices; s += kThreads) {
      best = fmaxf(best, call.partials.m[first + s * slice_stride]);
    }
  }
  const float m_old = call.rows.m[at];
  const float m_new = fmaxf(MaxOfBlock(best, warp_max), m_old);
  if (m_new == kMinusInf) return;  // Nothing seen, or nothing that weighs anything.

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  extern __shared__ float warp_o[];  // [kWarps][128]
  __shared__ float warp_l[kWarps];
  for (int first_dim = 0; first_dim < kv.v_dim; first_dim += 128) {
    const int dim = first_dim + lane * 4;
    const bool mine = dim < kv.v_dim;
    float4 sum = make_float4(0, 0, 0, 0);
    float l = 0;
    int skip = warp;  // Slices until this warp's next
    for (int p = 0; p < fold.num_parts; ++p) {
      const int64_t first =
          PartialIndex(call, parts[p].first_slice, kv_head) + parts[p].first_slot + head;
      int s = skip;
#pragma unroll 4
      for (; s < parts[p].num_slices; s += kWarps) {
        const int64_t partial = first + s * slice_stride;
        const float m = call.partials.m[partial];
        const float weight = exp2f(m - m_new);
        l += weight * call.partials.l[partial];
        float4 o = make_float4(0, 0, 0, 0);
        if (mine && m != kMinusInf) {
          o = *reinterpret_cast<const float4*>(call.partials.o + partial * kv.v_dim + dim);
        }
        sum.x += weight * o.x;
        sum.y += weight * o.y;
        sum.z += weight * o.z;
        sum.w += weight * o.w;
      }
      skip = s - parts[p].num_slices;
    }
    *reinterpret_cast<float4*>(warp_o + (warp * 32 + lane) * 4) = sum;
    if (lane == 0) warp_l[warp] = l;
    __syncthreads();
    const float factor = exp2f(m_old - m_new);
    if (first_dim + static_cast<int>(threadIdx.x) < kv.v_dim) {
      float* o = call.rows.o + at * kv.v_dim + first_dim + threadIdx.x;
      float total = *o * factor;
      for (int w = 0; w < kWarps; ++w) total += warp_o[w * 128 + threadIdx.x];
      *o = total;
    }
    if (threadIdx.x == 0 && first_dim == 0) {
      float total = call.rows.l[at] * factor;
      for (int w = 0; w < kWarps; ++w) total += warp_l[w];
      call.rows.l[at] = total;
      call.rows.m[at] = m_new;
    }
    __syncthreads();
  }
}

__device__ void StoreOut(float* out, float value) { *out = value; }
__device__ void StoreOut(__nv_bfloat16* out, float value) { *out = __float2bfloat16_rn(value); }

// A warp finishes one row of one head.
template <typename Out>
__global__ void __launch_bounds__(kThreads) MergeStatesKernel(MergeCall call) {
  const int64_t at = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (at >= call.count) return;
  const int lane = threadIdx.x % 32;
  const float l = call.l[at];
  const float m = call.m[at];
  float cpu_lse = kMinusInf;
  const bool with_cpu = call.cpu_out != nullptr && *call.failed == 0;
  if (with_cpu) {
    cpu_lse = call.cpu_lse[at];
    __syncwarp();
    if (lane == 0) call.cpu_lse[at] = kMinusInf;
  }
  const bool has_cpu = cpu_lse != kMinusInf;
  const bool has_own = l != 0;
  const float lse = has_own ? m + log2f(l) : kMinusInf;
  float weight = has_own ? 1 : 0;
  float cpu_weight = has_cpu ? 1 : 0;
  if (has_own && has_cpu) {
    const float lse_max = fmaxf(lse, cpu_lse);
    weight = exp2f(lse - lse_max);
    cpu_weight = exp2f(cpu_lse - lse_max);
    const float sum = weight + cpu_weight;
    weight /= sum;
    cpu_weight /= sum;
  }
  Out* out = static_cast<Out*>(call.out) + at * call.out_dim;
  for (int d = lane; d < call.out_dim; d += 32) {
    float value = 0;
    // Divided and not multiplied by the reciprocal: where l is 1 the values come out bit for bit.
    if (has_own) value = weight * (call.o[at * call.v_dim + d] / l);
    if (has_cpu) value += cpu_weight * call.cpu_out[at * call.v_dim + d];
    StoreOut(out + d, value);
  }
}

int GridFor(int64_t count, int64_t per_block, int64_t limit) {
  const int64_t blocks = (count + per_block - 1) / per_block;
  return static_cast<int>(blocks < 1 ? 1 : blocks > limit ? limit : blocks);
}

constexpr int64_t kManyBlocks = 1056;  // More than run at once on any GPU

}  // namespace

cudaError_t LaunchStageArrays(cudaStream_t stream, const std::byte* from, std::byte* to,
                              int64_t size_bytes) {
  const int64_t words = size_bytes / 4;
  StageArraysKernel<<<GridFor(words, kThreads, kManyBlocks), kThreads, 0, stream>>>(
      reinterpret_cast<const uint32_t*>(from), reinterpret_cast<uint32_t*>(to), words);
  return cudaGetLastError();
}

cudaError_t LaunchResetStates(cudaStream_t stream, int64_t count, int v_dim, float* o, float* m,
                              float* l) {
  ResetStatesKernel<<<GridFor(count * v_dim / 4, kThreads, kManyBlocks), kThreads, 0, stream>>>(
      count, v_dim, o, m, l);
  return cudaGetLastError();
}

cudaError_t LaunchFoldPartials(cudaStream_t stream, const SliceCall& call) {
  const int folds = call.sizes.num_folds < 1 ? 1 : call.sizes.num_folds;
  const dim3 grid(folds, call.rows.kv.num_kv_heads * kPanelSlots);
  FoldPartialsKernel<<<grid, kThreads, kWarps * 128 * sizeof(float), stream>>>(call);
  return cudaGetLastError();
}

cudaError_t LaunchMergeStates(cudaStream_t stream, const MergeCall& call) {
  const int64_t blocks = call.count < 1 ? 1 : (call.count + kWarps - 1) / kWarps;
  const dim3 grid(static_cast<unsigned>(blocks));
  if (call.out_bf16) {
    MergeStatesKernel<__nv_bfloat16><<<grid, kThreads, 0, stream>>>(call);
  } else {
    MergeStatesKernel<float><<<grid, kThreads, 0, stream>>>(call);
  }
  return cudaGetLastError();
}

}  // namespace writescope::kernels
