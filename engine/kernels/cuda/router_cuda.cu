#include "engine/kernels/cuda/launch.h"
#include "engine/kernels/cuda/router_choice.h"
#include "engine/kernels/cuda/router_cuda.h"

namespace writescope::kernels {
namespace {

// A warp takes a token.
constexpr int kRouteWarps = 4;

template <int kPerLane>
__global__ void RouteKernel(RouterConfig config, int num_tokens, const float* logits, bool replay,
                            int32_t* experts, float* weights) {
  WaitForKernelBefore();
  LetNextKernelBegin();
  const int64_t token = blockIdx.x * kRouteWarps + threadIdx.x / 32;
  if (token >= num_tokens) return;
  RouteToken<kPerLane>(config, token, logits, replay, experts, weights);
}

// One block sorts all pairs, by counting. Each warp counts and places a contiguous part, so that
// pairs of an expert stay in order. Where they fit, pairs are put in order in shared memory and
// written as whole lines: single words, each to another sector, take one multiprocessor long.
constexpr int kSortWarps = 32;
constexpr int kSortShared = 16;  // Bytes of the kernel's own

// The lanes whose value is the same in its lowest `bits` bits. __match_any_sync takes a turn for
// each different value, of which there may be 32; this takes one for each bit.
__device__ unsigned SameInWarp(int value, int bits) {
  unsigned same = kAllLanes;
  for (int bit = 0; bit < bits; ++bit) {
    const bool set = value >> bit & 1;
    const unsigned having = __ballot_sync(kAllLanes, set);
    same &= set ? having : ~having;
  }
  return same;
}

__global__ void __launch_bounds__(kSortWarps * 32)
    SortPairsKernel(int num_experts, int num_pairs, int tile_slots, int num_tiles, bool staged,
                    const int32_t* experts, int32_t* slot_pairs, ExpertTile* tiles) {
  // [kSortWarps][num_experts], [2][num_experts], and the order of the pairs where it is `staged`
  extern __shared__ int32_t counts[];
  int32_t* first_slots = counts + kSortWarps * num_experts;
  int32_t* first_tiles = first_slots + num_experts;
  int32_t* order = staged ? first_tiles + num_experts : slot_pairs;
  __shared__ int32_t total_tiles;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int expert_bits = 32 - __clz(num_experts);
  for (int i = threadIdx.x; i < kSortWarps * num_experts; i += blockDim.x) counts[i] = 0;
  WaitForKernelBefore();
  LetNextKernelBegin();
  __syncthreads();
  const int per_warp = ((num_pairs + kSortWarps - 1) / kSortWarps + 31) / 32 * 32;
  const int begin = warp * per_warp;
  const int end = min(num_pairs, begin + per_warp);
  int32_t* mine = counts + warp * num_experts;
#pragma unroll 4
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
  int next = begin + lane < end ? experts[begin + lane] : -1;
  for (int base = begin; base < end; base += 32) {
    const int expert = next;
    if (base + 32 + lane < end) next = experts[base + 32 + lane];
    const bool inside = base + lane < end;
    const unsigned same = SameInWarp(expert, expert_bits) & __ballot_sync(kAllLanes, inside);
    const int rank = __popc(same & ((1u << lane) - 1));
    if (inside) order[first_slots[expert] + mine[expert] + rank] = base + lane;
    __syncwarp();
    if (inside && rank == 0) mine[expert] += __popc(same);
    __syncwarp();
  }
  if (!staged) return;
  __syncthreads();
  for (int i = threadIdx.x; i < num_pairs; i += blockDim.x) slot_pairs[i] = order[i];
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
  const size_t count_bytes = (kSortWarps + 2) * num_experts * sizeof(int32_t);
  const size_t order_bytes = num_pairs * sizeof(int32_t);
  const bool staged =
      count_bytes + order_bytes <= static_cast<size_t>(MaxSharedBytes()) - kSortShared;
  // The default limit is 48 KiB.
  static const cudaError_t error = cudaFuncSetAttribute(
      SortPairsKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MaxSharedBytes() - kSortShared);
  if (error != cudaSuccess) return error;
  const int num_tiles = static_cast<int>(MaxExpertTiles(num_pairs, num_experts, tile_slots));
  return LaunchEarly(stream, &SortPairsKernel, 1, kSortWarps * 32,
                     count_bytes + (staged ? order_bytes : 0), num_experts, num_pairs, tile_slots,
                     num_tiles, staged, experts, slot_pairs, tiles);
}

}  // namespace writescope::kernels
