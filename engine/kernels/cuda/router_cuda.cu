#include "engine/kernels/cuda/launch.h"
#include "engine/kernels/cuda/router_cuda.h"
#include "engine/kernels/cuda/values.h"

namespace writescope::kernels {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kLowest = -INFINITY;

// A value and its index; the order of choice: larger values first, then lower indices.
struct Candidate {
  float value;
  int index;
};

__device__ Candidate Better(Candidate a, Candidate b) {
  return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

__device__ Candidate WarpBest(Candidate best) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    best = Better(best, {__shfl_xor_sync(kAllLanes, best.value, offset),
                         __shfl_xor_sync(kAllLanes, best.index, offset)});
  }
  return best;
}

// Of a token: expert e is value e / 32 of lane e % 32.
template <int kPerLane>
struct Probabilities {
  float p[kPerLane];

  // Each lane asks for an expert of its own.
  __device__ float Of(int expert) const {
    float mine = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const float theirs = __shfl_sync(kAllLanes, p[j], expert % 32);
      if (j == expert / 32) mine = theirs;
    }
    return mine;
  }
};

template <int kPerLane>
__device__ Probabilities<kPerLane> Softmax(int count, const float* logits, int lane) {
  Probabilities<kPerLane> result;
  float maximum = kLowest;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int i = lane + 32 * j;
    result.p[j] = i < count ? logits[i] : kLowest;
    maximum = fmaxf(maximum, result.p[j]);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, offset));
  }
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const bool valid = lane + 32 * j < count;
    result.p[j] = valid ? expf(result.p[j] - maximum) : 0.0f;
    sum += result.p[j];
  }
  sum = WarpSum(sum);
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) result.p[j] /= sum;
  return result;
}

// A mask of the groups whose experts may be chosen.
template <int kPerLane>
__device__ uint32_t EligibleGroups(const RouterConfig& config, const Probabilities<kPerLane>& all,
                                   int lane) {
  if (config.num_groups <= 1 || config.topk_groups >= config.num_groups) return kAllLanes;
  const int size = config.num_experts / config.num_groups;
  float mine = kLowest;  // The best of group `lane`
  for (int group = 0; group < config.num_groups; ++group) {
    Candidate best = {kLowest, 0};
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int i = lane + 32 * j;
      if (i < config.num_experts && i / size == group) best = Better(best, {all.p[j], 0});
    }
    best = WarpBest(best);
    if (lane == group) mine = best.value;
  }
  uint32_t eligible = 0;
  for (int i = 0; i < config.topk_groups; ++i) {
    const bool open = lane < config.num_groups && (eligible >> lane & 1) == 0;
    // A closed lane loses even to an open one of the lowest value, by its index.
    eligible |= 1u << (WarpBest({open ? mine : kLowest, open ? lane : lane + 32}).index % 32);
  }
  return eligible;
}

// The experts of a token; lane i gets the i-th.
template <int kPerLane>
__device__ int Choose(const RouterConfig& config, const Probabilities<kPerLane>& all, int lane) {
  // What is of another group or NaN counts as lowest.
  const uint32_t eligible = EligibleGroups(config, all, lane);
  const int group_size = config.num_experts / config.num_groups;
  float open[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int i = lane + 32 * j;
    const bool is_open = i < config.num_experts && !isnan(all.p[j]) &&
                         (config.num_groups <= 1 || (eligible >> (i / group_size) & 1) != 0);
    open[j] = is_open ? all.p[j] : kLowest;
  }
  uint32_t taken = 0;  // Of this lane's experts
  int mine = 0;
  for (int i = 0; i < config.experts_per_token; ++i) {
    Candidate best = {kLowest, kMaxExpertsCuda};
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int expert = lane + 32 * j;
      if (expert < config.num_experts && (taken >> j & 1) == 0) {
        best = Better(best, {open[j], expert});
      }
    }
    best = WarpBest(best);
    if (best.index % 32 == lane) taken |= 1u << (best.index / 32);
    if (lane == i) mine = best.index;
  }
  return mine;
}

// A warp takes a token.
constexpr int kRouteWarps = 4;

template <int kPerLane>
__global__ void RouteKernel(RouterConfig config, int num_tokens, const float* logits, bool replay,
                            int32_t* experts, float* weights) {
  WaitForKernelBefore();
  LetNextKernelBegin();
  const int lane = threadIdx.x % 32;
  const int64_t token = blockIdx.x * kRouteWarps + threadIdx.x / 32;
  if (token >= num_tokens) return;
  const Probabilities<kPerLane> all =
      Softmax<kPerLane>(config.num_experts, logits + token * config.num_experts, lane);
  const int k = config.experts_per_token;
  const int64_t at = token * k + lane;
  int mine = 0;
  if (!replay) {
    mine = Choose(config, all, lane);
  } else if (lane < k) {
    mine = experts[at];
  }
  const float p = all.Of(mine);
  float sum = 0;
  for (int i = 0; i < k; ++i) sum += __shfl_sync(kAllLanes, p, i);
  if (lane < k) {
    experts[at] = mine;
    weights[at] = p / (config.renormalize ? sum : 1.0f) * config.routed_scale;
  }
}

// One block sorts all pairs, by counting. Each warp counts and places a contiguous part, so that
// pairs of an expert stay in order.
constexpr int kSortWarps = 32;

__global__ void __launch_bounds__(kSortWarps * 32)
    SortPairsKernel(int num_experts, int num_pairs, int tile_slots, int num_tiles,
                    const int32_t* experts, int32_t* slot_pairs, ExpertTile* tiles) {
  extern __shared__ int32_t counts[];  // [kSortWarps][num_experts], then [2][num_experts]
  int32_t* first_slots = counts + kSortWarps * num_experts;
  int32_t* first_tiles = first_slots + num_experts;
  __shared__ int32_t total_tiles;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < kSortWarps * num_experts; i += blockDim.x) counts[i] = 0;
  WaitForKernelBefore();
  LetNextKernelBegin();
  __syncthreads();
  const int per_warp = ((num_pairs + kSortWarps - 1) / kSortWarps + 31) / 32 * 32;
  const int begin = warp * per_warp;
  const int end = min(num_pairs, begin + per_warp);
  int32_t* mine = counts + warp * num_experts;
  for (int i = begin + lane; i < end; i += 32) atomicAdd(mine + experts[i], 1);
  __syncthreads();
  // Each expert's pairs before those of each warp, and in all.
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
    int sum = 0;
    for (int w = 0; w < kSortWarps; ++w) {
      const int count = counts[w * num_experts + e];
      counts[w * num_experts + e] = sum;
      sum += count;
    }
    first_slots[e] = sum;
  }
  __syncthreads();
  // Exclusive sums over the experts, by one warp.
  if (warp == 0) {
    int slots_before = 0, tiles_before = 0;
    for (int base = 0; base < num_experts; base += 32) {
      const int e = base + lane;
      const int slots = e < num_experts ? first_slots[e] : 0;
      const int num = (slots + tile_slots - 1) / tile_slots;
      int slot_sum = slots, tile_sum = num;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other_slots = __shfl_up_sync(kAllLanes, slot_sum, offset);
        const int other_tiles = __shfl_up_sync(kAllLanes, tile_sum, offset);
        if (lane >= offset) {
          slot_sum += other_slots;
          tile_sum += other_tiles;
        }
      }
      if (e < num_experts) {
        first_slots[e] = slots_before + slot_sum - slots;
        first_tiles[e] = tiles_before + tile_sum - num;
      }
      slots_before += __shfl_sync(kAllLanes, slot_sum, 31);
      tiles_before += __shfl_sync(kAllLanes, tile_sum, 31);
    }
    if (lane == 0) total_tiles = tiles_before;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
    const int first = first_slots[e];
    const int last = e + 1 < num_experts ? first_slots[e + 1] : num_pairs;
    for (int i = 0; first + i * tile_slots < last; ++i) {
      const int slot = first + i * tile_slots;
      tiles[first_tiles[e] + i] = {e, slot, min(tile_slots, last - slot), 0};
    }
  }
  for (int i = total_tiles + threadIdx.x; i < num_tiles; i += blockDim.x) tiles[i] = {0, 0, 0, 0};
  // Lanes with the same expert take neighbouring slots, in the order of the lanes.
  for (int base = begin; base < end; base += 32) {
    const int i = base + lane;
    const int expert = i < end ? experts[i] : -1;
    const unsigned same = __match_any_sync(kAllLanes, expert);
    const int rank = __popc(same & ((1u << lane) - 1));
    if (expert >= 0) slot_pairs[first_slots[expert] + mine[expert] + rank] = i;
    __syncwarp();
    if (expert >= 0 && rank == 0) mine[expert] += __popc(same);
    __syncwarp();
  }
}

constexpr int kCombineThreads = 256;

template <typename T, bool kVector>
__global__ void CombineKernel(int k, int hidden, const T* results, const float* weights, T* out) {
  constexpr int kWidth = kVector ? 8 : 1;
  WaitForKernelBefore();
  const int64_t token = blockIdx.x;
  const int d = (blockIdx.y * kCombineThreads + threadIdx.x) * kWidth;
  if (d >= hidden) return;
  const T* from = results + token * k * hidden + d;
  T* to = out + token * hidden + d;
  if constexpr (kVector) {
    float sum[8] = {};
    for (int i = 0; i < k; ++i) {
      const float weight = weights[token * k + i];
      float values[8];
      Load8(from + static_cast<int64_t>(i) * hidden, values);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += weight * values[j];
    }
    float before[8];
    Load8(to, before);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += before[j];
    Store8(sum, to);
  } else {
    float sum = 0;
    for (int i = 0; i < k; ++i) {
      sum += weights[token * k + i] * ToFloat(from[static_cast<int64_t>(i) * hidden]);
    }
    *to = FromFloat<T>(ToFloat(*to) + sum);
  }
}

template <typename T>
cudaError_t Combine(cudaStream_t stream, int num_tokens, int k, int hidden, const void* results,
                    const float* weights, void* out) {
  const bool vector = hidden % 8 == 0 && IsAligned16(results) && IsAligned16(out);
  const int per_block = kCombineThreads * (vector ? 8 : 1);
  const dim3 grid(num_tokens, (hidden + per_block - 1) / per_block);
  const auto kernel = vector ? &CombineKernel<T, true> : &CombineKernel<T, false>;
  return LaunchEarly(stream, kernel, grid, kCombineThreads, 0, k, hidden,
                     static_cast<const T*>(results), weights, static_cast<T*>(out));
}

}  // namespace

cudaError_t LaunchRoute(cudaStream_t stream, const RouterConfig& config, int num_tokens,
                        const float* logits, bool replay, int32_t* experts, float* weights) {
  const int blocks = (num_tokens + kRouteWarps - 1) / kRouteWarps;
  const auto kernel =
      config.num_experts <= 128 ? &RouteKernel<4> : &RouteKernel<kMaxExpertsCuda / 32>;
  return LaunchEarly(stream, kernel, blocks, kRouteWarps * 32, 0, config, num_tokens, logits,
                     replay, experts, weights);
}

cudaError_t LaunchSortPairs(cudaStream_t stream, int num_experts, int num_pairs, int tile_slots,
                            const int32_t* experts, int32_t* slot_pairs, ExpertTile* tiles) {
  const size_t shared_bytes = (kSortWarps + 2) * num_experts * sizeof(int32_t);
  // The default limit is 48 KiB; kMaxExpertsCuda takes 51.
  static const cudaError_t error =
      cudaFuncSetAttribute(SortPairsKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>((kSortWarps + 2) * kMaxExpertsCuda * sizeof(int32_t)));
  if (error != cudaSuccess) return error;
  const int num_tiles = static_cast<int>(MaxExpertTiles(num_pairs, num_experts, tile_slots));
  return LaunchEarly(stream, &SortPairsKernel, 1, kSortWarps * 32, shared_bytes, num_experts,
                     num_pairs, tile_slots, num_tiles, experts, slot_pairs, tiles);
}

cudaError_t LaunchCombine(cudaStream_t stream, ValueType type, int num_tokens, int k, int hidden,
                          const void* results, const float* weights, void* out) {
  return type == ValueType::kF32
             ? Combine<float>(stream, num_tokens, k, hidden, results, weights, out)
             : Combine<__nv_bfloat16>(stream, num_tokens, k, hidden, results, weights, out);
}

}  // namespace writescope::kernels
