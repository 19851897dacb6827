// Attention in plain float32: every size and either dtype, and the twin on the device of the
// kernels with matrix instructions. Nothing here is newer than sm_75.
#include "engine/kernels/cuda/attend_launch.h"
#include "engine/kernels/cuda/attend_slices.h"

namespace writescope::kernels {
namespace {

constexpr int kThreads = 128;
constexpr int kChunkTokens = kBlockTokens;

// In shared memory: queries, output, weights and states of the panel's slots.
struct SimtShared {
  float* q;       // [kPanelSlots][k_dim]
  float* o;       // [kPanelSlots][v_dim]
  float* p;       // [kPanelSlots][kChunkTokens]: scores, then weights
  float* m;       // [kPanelSlots]
  float* l;       // [kPanelSlots]
  float* factor;  // [kPanelSlots]: of what was summed before
};

__device__ SimtShared FindShared(float* at, const KvGeometry& kv) {
  SimtShared shared;
  shared.q = at;
  shared.o = shared.q + kPanelSlots * kv.k_dim;
  shared.p = shared.o + kPanelSlots * kv.v_dim;
  shared.m = shared.p + kPanelSlots * kChunkTokens;
  shared.l = shared.m + kPanelSlots;
  shared.factor = shared.l + kPanelSlots;
  return shared;
}

int64_t SharedBytes(const KvGeometry& kv) {
  return 4 * int64_t{kPanelSlots} * (kv.k_dim + kv.v_dim + kChunkTokens + 3);
}

__device__ float LoadValue(const std::byte* plane, int64_t index, KvDtype dtype) {
  if (dtype == KvDtype::kF32) return reinterpret_cast<const float*>(plane)[index];
  const uint32_t bits = reinterpret_cast<const uint16_t*>(plane)[index];
  return __uint_as_float(bits << 16);
}

__device__ float LoadKey(const std::byte* k, int token, int dim, const KvGeometry& kv) {
  return LoadValue(k, KIndex(token, dim, kv.k_dim, KvWordValues(kv.dtype)), kv.dtype);
}

// `k` is the head's K plane.
__device__ float LoadV(const std::byte* k, int token, int dim, const KvGeometry& kv) {
  if (kv.value_in_key) return LoadKey(k, token, dim, kv);
  return LoadValue(k + kv.k_plane_bytes(), VIndex(token, dim, kv.v_dim, KvWordValues(kv.dtype)),
                   kv.dtype);
}

// Scores of a block: thread i takes token i % 64 for every other slot.
__device__ void ScoreBlock(const KvGeometry& kv, const std::byte* k, const SimtShared& shared,
                           const Slice& slice, int num_slots, int num_tokens, int64_t position) {
  const int token = threadIdx.x % kChunkTokens;
  for (int slot = threadIdx.x / kChunkTokens; slot < num_slots; slot += kThreads / kChunkTokens) {
    const int64_t visible = slice.rows[slot / slice.panel->num_heads].visible;
    float score = kMinusInf;
    if (token < num_tokens && position + token < visible) {
      score = 0;
      for (int d = 0; d < kv.k_dim; ++d) {
        score += shared.q[slot * kv.k_dim + d] * LoadKey(k, token, d, kv);
      }
    }
    shared.p[slot * kChunkTokens + token] = score;
  }
}

// Scores to weights: a warp for each slot.
__device__ void WeighBlock(const SimtShared& shared, int num_slots) {
  const int lane = threadIdx.x % 32;
  for (int slot = threadIdx.x / 32; slot < num_slots; slot += kThreads / 32) {
    float* p = shared.p + slot * kChunkTokens;
    float best = fmaxf(p[lane], p[lane + 32]);
    for (int step = 16; step > 0; step /= 2) {
      best = fmaxf(best, __shfl_xor_sync(~0u, best, step));
    }
    const float m_old = shared.m[slot];
    const float m_new = fmaxf(m_old, best);
    const float base = m_new == kMinusInf ? 0 : m_new;  // (-inf) - (-inf) would be NaN.
    const float low = exp2f(p[lane] - base);
    const float high = exp2f(p[lane + 32] - base);
    float sum = low + high;
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    p[lane] = low;
    p[lane + 32] = high;
    __syncwarp();
    if (lane == 0) {
      const float factor = exp2f(m_old - base);
      shared.factor[slot] = factor;
      shared.m[slot] = m_new;
      shared.l[slot] = shared.l[slot] * factor + sum;
    }
  }
}

// A thread for each dim.
__device__ void AddValues(const KvGeometry& kv, const std::byte* k, const SimtShared& shared,
                          int num_slots, int num_tokens) {
  for (int dim = threadIdx.x; dim < kv.v_dim; dim += kThreads) {
    float sum[kPanelSlots];
#pragma unroll
    for (int slot = 0; slot < kPanelSlots; ++slot) {
      sum[slot] = slot < num_slots ? shared.o[slot * kv.v_dim + dim] * shared.factor[slot] : 0;
    }
    for (int t = 0; t < num_tokens; ++t) {
      const float value = LoadV(k, t, dim, kv);
#pragma unroll
      for (int slot = 0; slot < kPanelSlots; ++slot) {
        // What weighs nothing is not read as a product: it may be anything.
        const float weight = slot < num_slots ? shared.p[slot * kChunkTokens + t] : 0;
        if (weight != 0) sum[slot] += weight * value;
      }
    }
#pragma unroll
    for (int slot = 0; slot < kPanelSlots; ++slot) {
      if (slot < num_slots) shared.o[slot * kv.v_dim + dim] = sum[slot];
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    AttendSimtKernel(const __grid_constant__ SliceCall call) {
  extern __shared__ float shared_floats[];
  __shared__ SliceQueue queue;
  const KvGeometry& kv = call.rows.kv;
  const SimtShared shared = FindShared(shared_floats, kv);
  const int kv_head = blockIdx.y;
  const bool has_work = queue.Begin(call, blockIdx.x);
  WaitForKernelBefore();
  LetNextKernelBegin();
  if (!has_work) return;
  for (int i = 0; queue.slices[i % 2].num_blocks > 0; ++i) {
    const Slice& slice = queue.slices[i % 2];
    queue.LookAhead(call, i);
    const int num_slots = slice.panel->num_rows * slice.panel->num_heads;
    for (int slot = 0; slot < num_slots; ++slot) {
      const float* q = call.rows.q + SlotState(call, slice, kv_head, slot) * kv.k_dim;
      for (int d = threadIdx.x; d < kv.k_dim; d += kThreads) shared.q[slot * kv.k_dim + d] = q[d];
      for (int d = threadIdx.x; d < kv.v_dim; d += kThreads) shared.o[slot * kv.v_dim + d] = 0;
    }
    if (threadIdx.x < kPanelSlots) {
      shared.m[threadIdx.x] = kMinusInf;
      shared.l[threadIdx.x] = 0;
    }
    __syncthreads();
    for (int b = 0; b < slice.num_blocks; ++b) {
      const std::byte* k = slice.base + b * kv.block_bytes() + kv_head * kv.head_bytes();
      const int num_tokens = min(kBlockTokens, slice.num_tokens - b * kBlockTokens);
      ScoreBlock(kv, k, shared, slice, num_slots, num_tokens,
                 slice.first_position + int64_t{b} * kBlockTokens);
      __syncthreads();
      WeighBlock(shared, num_slots);
      __syncthreads();
      AddValues(kv, k, shared, num_slots, num_tokens);
      __syncthreads();
    }
    const int64_t first = PartialIndex(call, queue.sizes, slice.index, kv_head);
    for (int at = threadIdx.x; at < num_slots * kv.v_dim; at += kThreads) {
      call.partials.o[first * kv.v_dim + at] = shared.o[at];
    }
    if (threadIdx.x < num_slots) {
      call.partials.m[first + threadIdx.x] = shared.m[threadIdx.x];
      call.partials.l[first + threadIdx.x] = shared.l[threadIdx.x];
    }
    __syncthreads();
  }
}

// Beyond 48 KiB a kernel has to ask for shared memory.
cudaError_t Prepare() {
  int device = 0;
  int bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(AttendSimtKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              bytes - static_cast<int>(sizeof(SliceQueue)) - 1024);
}

cudaError_t Launch(cudaStream_t stream, const SliceCall& call) {
  const int chunks = call.sizes.num_chunks < 1 ? 1 : call.sizes.num_chunks;
  const dim3 grid(chunks, call.rows.kv.num_kv_heads);
  return LaunchSlices(stream, &AttendSimtKernel, grid, kThreads,
                      static_cast<size_t>(SharedBytes(call.rows.kv)), call);
}

}  // namespace

SliceKernel SimtKernel() {
  SliceKernel kernel;
  kernel.prepare = Prepare;
  kernel.launch = Launch;
  kernel.blocks_per_processor = 4;
  return kernel;
}

}  // namespace writescope::kernels
