// How a warp chooses the experts of a token, from its logits. For .cu files only.
#pragma once

#include <cstdint>

#include "engine/kernels/cuda/router_cuda.h"
#include "engine/kernels/cuda/values.h"

namespace writescope::kernels {

inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr float kLowest = -INFINITY;

// A value and its index; the order of choice: larger values first, then lower indices.
struct Candidate {
  float value;
  int index;
};

__device__ inline Candidate Better(Candidate a, Candidate b) {
  return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

__device__ inline Candidate WarpBest(Candidate best) {
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

// kShared: the logits lie in shared memory; else other thread blocks may have written them.
template <int kPerLane, bool kShared>
__device__ Probabilities<kPerLane> Softmax(int count, const float* logits, int lane) {
  Probabilities<kPerLane> result;
  float maximum = kLowest;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int i = lane + 32 * j;
    result.p[j] = i < count ? (kShared ? logits[i] : __ldcg(logits + i)) : kLowest;
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

// The index of the largest value in the warp, the lowest of those. No value is below 0 but kLowest.
__device__ inline int WarpBestIndex(Candidate best) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  // Floats from 0 on are in the order of their bits.
  const uint32_t key = best.value < 0 ? 0 : __float_as_uint(best.value) + 1;
  const uint32_t largest = __reduce_max_sync(kAllLanes, key);
  return __reduce_min_sync(kAllLanes, key == largest ? best.index : INT32_MAX);
#else
  return WarpBest(best).index;
#endif
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
    const int chosen = WarpBestIndex(best);
    if (chosen % 32 == lane) taken |= 1u << (chosen / 32);
    if (lane == i) mine = chosen;
  }
  return mine;
}

// logits [tokens, num_experts] to experts and weights [tokens, experts_per_token] of one token;
// lane i returns its i-th expert. With `replay` the experts are given.
template <int kPerLane, bool kShared = false>
__device__ int RouteToken(const RouterConfig& config, int64_t token, const float* logits,
                          bool replay, int32_t* experts, float* weights) {
  const int lane = threadIdx.x % 32;
  const Probabilities<kPerLane> all =
      Softmax<kPerLane, kShared>(config.num_experts, logits + token * config.num_experts, lane);
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
  return mine;
}

}  // namespace writescope::kernels
