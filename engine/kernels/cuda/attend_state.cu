// States of rows: empty, folded with partials, finished. Nothing here is newer than sm_75.
#include <cuda_bf16.h>

#include "engine/kernels/cuda/attend_fold.h"
#include "engine/kernels/cuda/attend_launch.h"
#include "engine/kernels/cuda/launch.h"

namespace writescope::kernels {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kFoldThreads = 512;
constexpr int kFoldWarps = kFoldThreads / 32;
constexpr int kFoldRowThreads = 256;

__global__ void StageArraysKernel(const uint32_t* from, uint32_t* to, int64_t num_words) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < num_words;
       i += int64_t{gridDim.x} * kThreads) {
    to[i] = from[i];
  }
}

__global__ void ResetStatesKernel(int64_t count, float* m, float* l) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += stride) {
    m[i] = kMinusInf;
    l[i] = 0;
  }
}

// Of the threads that fold.
__device__ float MaxOfBlock(float value, float* shared) {
  for (int step = 16; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  for (int w = 0; w < kFoldWarps; ++w) value = fmaxf(value, shared[w]);
  return value;
}

// A thread block folds one row of one head. The warps share out the dims, 128 each, and what is
// left of them the slices: group g takes every num_groups-th from the g-th on, and the groups' sums
// are added in order.
__global__ void __launch_bounds__(kFoldThreads)
    FoldPartialsKernel(const __grid_constant__ SliceCall call) {
  WaitForKernelBefore();
  LetNextKernelBegin();
  const SliceSizes& sizes = call.sizes;
  if (static_cast<int>(blockIdx.x) >= sizes.num_folds) return;
  const SliceArrays arrays = ArraysOf(call);
  const FoldRow fold = arrays.folds[blockIdx.x];
  const KvGeometry& kv = call.rows.kv;
  const int kv_head = blockIdx.y / kPanelSlots;
  const int head = blockIdx.y % kPanelSlots;
  if (head >= fold.num_heads) return;
  const int64_t at = FoldState(call, fold, kv_head) + head;
  const FoldPart* parts = arrays.parts + fold.first_part;
  const int64_t slice_stride = int64_t{kv.num_kv_heads} * sizes.num_slots;
  const auto first_partial = [&](const FoldPart& part) {
    return PartialIndex(call, sizes, part.first_slice, kv_head) + part.first_slot + head;
  };

  __shared__ float warp_max[kFoldWarps];
  float best = kMinusInf;
  for (int p = 0; p < fold.num_parts; ++p) {
    for (int s = threadIdx.x; s < parts[p].num_slices; s += kFoldThreads) {
      best = fmaxf(best, call.partials.m[first_partial(parts[p]) + s * slice_stride]);
    }
  }
  const float m_old = call.rows.m[at];
  const float m_new = fmaxf(MaxOfBlock(best, warp_max), m_old);
  if (m_new == kMinusInf) return;  // Nothing seen, or nothing that weighs anything.

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int num_ranges = (kv.v_dim + 127) / 128;
  const int num_groups = kFoldWarps / num_ranges;
  const int group = warp / num_ranges;
  const int dim = warp % num_ranges * 128 + lane * 4;
  __shared__ float group_o[kFoldWarps * 128];  // [num_groups][v_dim]
  __shared__ float group_l[kFoldWarps];
  if (group < num_groups) {
    float4 sum = make_float4(0, 0, 0, 0);
    float l = 0;
    int skip = group;  // Slices until this group's next
    for (int p = 0; p < fold.num_parts; ++p) {
      const int64_t first = first_partial(parts[p]);
      int s = skip;
#pragma unroll 8
      for (; s < parts[p].num_slices; s += num_groups) {
        const int64_t partial = first + s * slice_stride;
        const float m = call.partials.m[partial];
        const float weight = exp2f(m - m_new);
        l += weight * call.partials.l[partial];
        float4 o = make_float4(0, 0, 0, 0);
        if (dim < kv.v_dim && m != kMinusInf) {
          o = *reinterpret_cast<const float4*>(call.partials.o + partial * kv.v_dim + dim);
        }
        AddScaled(weight, o, &sum);
      }
      skip = s - parts[p].num_slices;
    }
    if (dim < kv.v_dim) *reinterpret_cast<float4*>(group_o + group * kv.v_dim + dim) = sum;
    group_l[group] = l;  // The same for all lanes and ranges
  }
  __syncthreads();
  const float factor = exp2f(m_old - m_new);
  for (int d = threadIdx.x; d < kv.v_dim; d += kFoldThreads) {
    float total = m_old == kMinusInf ? 0 : call.rows.o[at * kv.v_dim + d] * factor;
    for (int g = 0; g < num_groups; ++g) total += group_o[g * kv.v_dim + d];
    call.rows.o[at * kv.v_dim + d] = total;
  }
  if (threadIdx.x == 0) {
    float total = call.rows.l[at] * factor;
    for (int g = 0; g < num_groups; ++g) total += group_l[g];
    call.rows.l[at] = total;
    call.rows.m[at] = m_new;
  }
}

struct FoldShared {
  float m[kPanelSlots];  // By head
  float l[kPanelSlots];
};

// All heads of a fold, by all threads of the block.
__device__ void FoldRowHeads(const SliceCall& call, const SliceArrays& arrays, const FoldRow& fold,
                             int kv_head, FoldShared& shared) {
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

// The same for few slices: a thread block folds all heads of a row.
__global__ void __launch_bounds__(kFoldRowThreads)
    FoldRowsKernel(const __grid_constant__ SliceCall call) {
  WaitForKernelBefore();
  LetNextKernelBegin();
  if (static_cast<int>(blockIdx.x) >= call.sizes.num_folds) return;
  __shared__ FoldShared shared;
  const SliceArrays arrays = ArraysOf(call);
  FoldRowHeads(call, arrays, arrays.folds[blockIdx.x], blockIdx.y, shared);
}

__device__ void StoreOut(float* out, float value) { *out = value; }
__device__ void StoreOut(__nv_bfloat16* out, float value) { *out = __float2bfloat16_rn(value); }

// Four neighbours of a row that is a multiple of 32 long; zeros outside.
__device__ float4 LoadInside(bool inside, const float* from) {
  return inside ? *reinterpret_cast<const float4*>(from) : make_float4(0, 0, 0, 0);
}
// The same of what the CPU wrote, past caches: with `behind_wait` the kernel may begin while the
// one before still runs, and what an earlier merge read may still lie in a cache.
__device__ float4 LoadFromCpu(bool inside, const float* from) {
  return inside ? __ldcg(reinterpret_cast<const float4*>(from)) : make_float4(0, 0, 0, 0);
}

// A warp finishes one row of one head, 512 values at a time. What comes over the link is asked for
// at once, values before it is known whether there are any: each question takes microseconds there.
template <typename Out>
__global__ void __launch_bounds__(kThreads) MergeStatesKernel(MergeCall call) {
  constexpr int kLoads = 4;
  const int64_t at = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (at >= call.count) return;
  const int lane = threadIdx.x % 32;
  const bool with_cpu = call.cpu_out != nullptr && __ldcv(call.failed) == 0;
  const float* own_out = call.o + at * call.v_dim;
  const float* cpu_out = with_cpu ? call.cpu_out + at * call.v_dim : nullptr;
  Out* out = static_cast<Out*>(call.out) + at * call.out_dim;
  const float cpu_lse = with_cpu ? __ldcg(call.cpu_lse + at) : kMinusInf;
  float weight = 0, cpu_weight = 0, l = 0;
  for (int first = lane * 4; first < call.v_dim; first += kLoads * 128) {
    float4 cpu[kLoads], own[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int d = first + i * 128;
      cpu[i] = LoadFromCpu(with_cpu && d < call.v_dim, cpu_out + d);
      own[i] = LoadInside(d < call.v_dim, own_out + d);
    }
    if (first < 128) {
      l = call.l[at];
      const float lse = l != 0 ? call.m[at] + log2f(l) : kMinusInf;
      weight = l != 0 ? 1 : 0;
      cpu_weight = cpu_lse != kMinusInf ? 1 : 0;
      if (weight != 0 && cpu_weight != 0) {
        const float lse_max = fmaxf(lse, cpu_lse);
        weight = exp2f(lse - lse_max);
        cpu_weight = exp2f(cpu_lse - lse_max);
        const float sum = weight + cpu_weight;
        weight /= sum;
        cpu_weight /= sum;
      }
    }
    const bool has_cpu = cpu_lse != kMinusInf;
    const auto merged = [&](float from_own, float from_cpu) {
      // Divided and not multiplied by the reciprocal: where l is 1 the values come out bit for bit.
      const float value = l != 0 ? weight * (from_own / l) : 0;
      return has_cpu ? value + cpu_weight * from_cpu : value;
    };
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int d = first + i * 128;
      if (d < call.out_dim) StoreOut(out + d, merged(own[i].x, cpu[i].x));
      if (d + 1 < call.out_dim) StoreOut(out + d + 1, merged(own[i].y, cpu[i].y));
      if (d + 2 < call.out_dim) StoreOut(out + d + 2, merged(own[i].z, cpu[i].z));
      if (d + 3 < call.out_dim) StoreOut(out + d + 3, merged(own[i].w, cpu[i].w));
    }
  }
  // After all lanes have read it: the next layer begins with nothing.
  __syncwarp();
  if (with_cpu && lane == 0) call.cpu_lse[at] = kMinusInf;
}

// Of 16 bytes, for the row with the most slices.
int64_t FoldLoads(const KvGeometry& kv, const SliceSizes& sizes) {
  return int64_t{sizes.max_fold_slices} * sizes.num_slots * kv.v_dim / 4;
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

cudaError_t LaunchResetStates(cudaStream_t stream, int64_t count, float* m, float* l) {
  ResetStatesKernel<<<GridFor(count, kThreads, kManyBlocks), kThreads, 0, stream>>>(count, m, l);
  return cudaGetLastError();
}

cudaError_t LaunchFoldPartials(cudaStream_t stream, const SliceCall& call) {
  const int folds = call.sizes.num_folds < 1 ? 1 : call.sizes.num_folds;
  const int kv_heads = call.rows.kv.num_kv_heads;
  // Rows enough to fill the GPU, and for each thread no more loads than it can have on their way.
  constexpr int kThreadBlocksMin = 64;
  constexpr int64_t kLoadsMax = 32;
  if (folds * kv_heads >= kThreadBlocksMin &&
      FoldLoads(call.rows.kv, call.sizes) <= kLoadsMax * kFoldRowThreads) {
    return LaunchEarly(stream, &FoldRowsKernel, dim3(folds, kv_heads), kFoldRowThreads, 0, call);
  }
  return LaunchEarly(stream, &FoldPartialsKernel, dim3(folds, kv_heads * kPanelSlots), kFoldThreads,
                     0, call);
}

cudaError_t LaunchMergeStates(cudaStream_t stream, const MergeCall& call) {
  const int64_t blocks = call.count < 1 ? 1 : (call.count + kWarps - 1) / kWarps;
  const dim3 grid(static_cast<unsigned>(blocks));
  const auto kernel = call.out_bf16 ? MergeStatesKernel<__nv_bfloat16> : MergeStatesKernel<float>;
  if (call.behind_wait) return LaunchEarly(stream, kernel, grid, kThreads, 0, call);
  kernel<<<grid, kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace writescope::kernels
