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

}  // namespace writescope::kernels
