// All that comes between the attention of few tokens and their experts, in one launch: the norm,
// the router's product, the choice, and the order of the pairs. Each of these is less work than a
// launch. The thread blocks share out the experts; one of them gets all logits, and goes on alone:
// where they fit into a cluster (sm_90) the first, in whose shared memory the others leave them,
// else the last of them to be done, by way of global memory.
#include "engine/kernels/cuda/cluster.h"
#include "engine/kernels/cuda/launch.h"
#include "engine/kernels/cuda/router_choice.h"
#include "engine/kernels/cuda/router_cuda.h"
#include "engine/kernels/cuda/tensor_core.h"
#include "engine/kernels/cuda/values.h"

namespace writescope::kernels {
namespace {

constexpr int kWarps = 16;  // Divide the columns, then take a token each.
constexpr int kThreads = kWarps * 32;
constexpr int kRows = 16;          // Of the router's matrix, in a block
constexpr int kStep = 64;          // Columns of a warp at a time
constexpr int kKeptVectors = 8;    // Of a lane's part of a row of x
constexpr int kClusterBlocks = 8;  // At most, by what any GPU with clusters allows
constexpr int kPadding = 8;  // Values between rows in shared memory: they begin at other banks.

static_assert(kRouteFewTokens <= kWarps && kRouteFewPairs <= kThreads);

struct WeightStep {
  uint4 low[2], high[2];
};

// In shared memory, before the rows.
struct RouteShared {
  float warp_sums[kWarps][kRouteFewTokens][kRows + 4];
  float squares[kWarps];
  alignas(16) int32_t pairs[kRouteFewPairs];
  int32_t sorted_expert[kRouteFewPairs];
  int32_t sorted_rank[kRouteFewPairs];  // Among those of its expert
  int32_t sorted_count[kRouteFewPairs];
  uint32_t first_of_tile[kRouteFewPairs / 32];
  float logits[kRouteFewTokens * kClusterBlocks * kRows];  // [num_tokens, num_experts]
  bool last;
};

__device__ float SumOfSquares(const uint4& bits) {
  float values[8];
  Load8(reinterpret_cast<const __nv_bfloat16*>(&bits), values);
  float sum = 0;
#pragma unroll
  for (float value : values) sum += value * value;
  return sum;
}

// Rows of x to shared memory, normed where a norm is asked for. The warps are divided among the
// rows; each block writes some of the normed rows back.
__device__ void StageRows(const RouteFewArgs& args, const float* norm, RouteShared& shared,
                          __nv_bfloat16* rows) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int stride = args.hidden + kPadding;
  int per_row = kWarps;  // Warps, a power of two
  while (per_row * args.num_tokens > kWarps) per_row /= 2;
  const int row = warp / per_row, part = warp % per_row;
  const bool active = row < args.num_tokens;
  const int step = per_row * 32 * 8;
  const __nv_bfloat16* x = static_cast<const __nv_bfloat16*>(args.x) + int64_t{row} * args.hidden;
  const int first = (part * 32 + lane) * 8;
  // What fits is kept, its loads on their way together; what does not is read again.
  uint4 kept[kKeptVectors];
#pragma unroll
  for (int i = 0; i < kKeptVectors; ++i) {
    const int d = first + i * step;
    kept[i] =
        active && d < args.hidden ? *reinterpret_cast<const uint4*>(x + d) : make_uint4(0, 0, 0, 0);
  }
  float sum = 0;
#pragma unroll
  for (const uint4& bits : kept) sum += SumOfSquares(bits);
  if (active) {
    for (int d = first + kKeptVectors * step; d < args.hidden; d += step) {
      sum += SumOfSquares(*reinterpret_cast<const uint4*>(x + d));
    }
  }
  sum = WarpSum(sum);
  if (lane == 0) shared.squares[warp] = sum;
  __syncthreads();
  if (!active) return;
  sum = 0;
  for (int w = row * per_row; w < (row + 1) * per_row; ++w) sum += shared.squares[w];
  const float factor = 1.0f / sqrtf(sum / static_cast<float>(args.hidden) + args.norm_eps);
  const bool writes_back = args.norm != nullptr && row % gridDim.x == blockIdx.x;
  __nv_bfloat16* normed = static_cast<__nv_bfloat16*>(args.normed) + int64_t{row} * args.hidden;
  const auto stage = [&](int d, const uint4& bits) {
    if (args.norm == nullptr) {
      *reinterpret_cast<uint4*>(rows + row * stride + d) = bits;
      return;
    }
    float values[8], weights[8];
    Load8(reinterpret_cast<const __nv_bfloat16*>(&bits), values);
    Load8(norm + d, weights);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = values[i] * factor * weights[i];
    Store8(values, rows + row * stride + d);
    if (writes_back) Store8(values, normed + d);
  };
#pragma unroll
  for (int i = 0; i < kKeptVectors; ++i) {
    if (first + i * step < args.hidden) stage(first + i * step, kept[i]);
  }
  for (int d = first + kKeptVectors * step; d < args.hidden; d += step) {
    stage(d, *reinterpret_cast<const uint4*>(x + d));
  }
}

// Pairs sorted by expert, those of an expert by pair; see LaunchSortPairs. By a thread for each.
__device__ void SortFew(const RouteFewArgs& args, RouteShared& shared) {
  const int num_pairs = args.num_tokens * args.config.experts_per_token;
  const int at = threadIdx.x;
  if (at < num_pairs) {
    const int expert = shared.pairs[at];
    int slot = 0, rank = 0, count = 0;
#pragma unroll 4
    for (int j = 0; j < num_pairs; j += 4) {
      const int4 four = *reinterpret_cast<const int4*>(&shared.pairs[j]);
      const int others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool same = others[i] == expert;
        const bool same_before = same && j + i < at;
        slot += others[i] < expert || same_before;
        rank += same_before;
        count += same;
      }
    }
    args.slot_pairs[slot] = at;
    shared.sorted_expert[slot] = expert;
    shared.sorted_rank[slot] = rank;
    shared.sorted_count[slot] = count;
  }
  __syncthreads();
  const bool first = at < num_pairs && shared.sorted_rank[at] % args.tile_slots == 0;
  const uint32_t word = __ballot_sync(kAllLanes, first);
  if (threadIdx.x % 32 == 0) shared.first_of_tile[threadIdx.x / 32] = word;
  __syncthreads();
  int index = __popc(word & ((1u << (threadIdx.x % 32)) - 1));
  int total = 0;
  for (int w = 0; w < kWarps; ++w) {
    const int tiles = __popc(shared.first_of_tile[w]);
    if (w < static_cast<int>(threadIdx.x / 32)) index += tiles;
    total += tiles;
  }
  if (first) {
    const int left = shared.sorted_count[at] - shared.sorted_rank[at];
    args.tiles[index] = {shared.sorted_expert[at], at, min(args.tile_slots, left), 0};
  }
  for (int i = total + threadIdx.x; i < args.num_tiles; i += kThreads) args.tiles[i] = {0, 0, 0, 0};
}

// The same for one token, whose experts differ, by one warp: lane i has the i-th expert.
__device__ void SortOneToken(const RouteFewArgs& args, int mine) {
  const int lane = threadIdx.x % 32, k = args.config.experts_per_token;
  int slot = 0;
  for (int i = 0; i < k; ++i) slot += __shfl_sync(kAllLanes, mine, i) < mine;
  if (lane < k) {
    args.slot_pairs[slot] = lane;
    args.tiles[slot] = {mine, slot, 1, 0};
  }
  for (int i = k + lane; i < args.num_tiles; i += 32) args.tiles[i] = {0, 0, 0, 0};
}

template <int kSlotTiles, int kPerLane, bool kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    RouteFewKernel(const __grid_constant__ RouteFewArgs args) {
  extern __shared__ __align__(16) std::byte shared_bytes[];
  RouteShared& shared = *reinterpret_cast<RouteShared*>(shared_bytes);
  auto* norm = reinterpret_cast<float*>(shared_bytes + sizeof(RouteShared));
  auto* rows = reinterpret_cast<__nv_bfloat16*>(norm + (args.norm != nullptr ? args.hidden : 0));
  const int num_experts = args.config.num_experts;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_row = blockIdx.x * kRows;
  // Rows past the end repeat the last; nobody reads their sums.
  const auto row_of = [&](int row) {
    return args.router +
           (min(first_row + row, num_experts - 1) * args.router_stride + lane % 4 * 8) * 2;
  };
  const std::byte* low = row_of(lane / 4);
  const std::byte* high = row_of(lane / 4 + 8);
  const auto load_weights = [&](int col, WeightStep* to) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const bool inside = col + 32 * b + lane % 4 * 8 < args.hidden;
      to->low[b] = inside ? LoadOnce(low + (col + 32 * b) * 2) : make_uint4(0, 0, 0, 0);
      to->high[b] = inside ? LoadOnce(high + (col + 32 * b) * 2) : make_uint4(0, 0, 0, 0);
    }
  };
  if constexpr (kCluster) ArriveAtCluster();  // This block's shared memory can be written.
  // The first weights, and those of the norm, come while the kernel before is still at work on x.
  constexpr int kBlockStep = kWarps * kStep;
  WeightStep now, next;
  int col = warp * kStep;
  if (col < args.hidden) load_weights(col, &now);
  if (col + kBlockStep < args.hidden) load_weights(col + kBlockStep, &next);
  for (int d = threadIdx.x; args.norm != nullptr && d < args.hidden; d += kThreads) {
    norm[d] = args.norm[d];
  }
  WaitForKernelBefore();
  LetNextKernelBegin();
  StageRows(args, norm, shared, rows);
  __syncthreads();

  const int stride = args.hidden + kPadding;
  float sums[kSlotTiles][4] = {};
  for (; col < args.hidden; col += kBlockStep) {
    const WeightStep weights = now;
    now = next;
    if (col + 2 * kBlockStep < args.hidden) load_weights(col + 2 * kBlockStep, &next);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const uint32_t first[4] = {weights.low[b].x, weights.high[b].x, weights.low[b].y,
                                 weights.high[b].y};
      const uint32_t second[4] = {weights.low[b].z, weights.high[b].z, weights.low[b].w,
                                  weights.high[b].w};
      const int d = col + 32 * b + lane % 4 * 8;
#pragma unroll
      for (int n = 0; n < kSlotTiles; ++n) {
        const int row = n * 8 + lane / 4;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (row < args.num_tokens && d < args.hidden) {
          x = *reinterpret_cast<const uint4*>(rows + row * stride + d);
        }
        Mma(first, x.x, x.y, sums[n]);
        Mma(second, x.z, x.w, sums[n]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kSlotTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      shared.warp_sums[warp][n * 8 + lane % 4 * 2 + c % 2][lane / 4 + c / 2 * 8] = sums[n][c];
    }
  }
  __syncthreads();
  float* logits = args.logits;
  if constexpr (kCluster) {
    WaitForCluster();  // All blocks have begun.
    logits = InFirstOfCluster(shared.logits);
  }
  for (int i = threadIdx.x; i < args.num_tokens * kRows; i += kThreads) {
    const int token = i / kRows, r = i % kRows;
    if (first_row + r >= num_experts) continue;
    float value = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) value += shared.warp_sums[w][token][r];
    logits[token * num_experts + first_row + r] = value;
  }
  if constexpr (kCluster) {
    __syncwarp();
    ArriveAtCluster();
    if (blockIdx.x != 0) return;
    WaitForCluster();
  } else {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      shared.last = atomicAdd(args.arrivals, 1u) + 1 == gridDim.x;
      if (shared.last) *args.arrivals = 0;
    }
    __syncthreads();
    if (!shared.last) return;
    __threadfence();
  }
  if (warp < args.num_tokens) {
    const int mine =
        RouteToken<kPerLane, kCluster>(args.config, warp, kCluster ? shared.logits : args.logits,
                                       /*replay=*/false, args.experts, args.weights);
    const int k = args.config.experts_per_token;
    if (args.num_tokens == 1) SortOneToken(args, mine);
    if (lane < k) shared.pairs[warp * k + lane] = mine;
  }
  if (args.num_tokens == 1) return;
  const int num_pairs = args.num_tokens * args.config.experts_per_token;
  // To whole fours, by what is no expert and comes after all.
  if (threadIdx.x < 4 && num_pairs + threadIdx.x < kRouteFewPairs) {
    shared.pairs[num_pairs + threadIdx.x] = INT32_MAX;
  }
  __syncthreads();
  SortFew(args, shared);
}

int SharedBytes(const RouteFewArgs& args) {
  return static_cast<int>(sizeof(RouteShared)) + (args.norm != nullptr ? args.hidden * 4 : 0) +
         args.num_tokens * (args.hidden + kPadding) * 2;
}

using Kernel = void (*)(RouteFewArgs);
// By whether there are more than 8 tokens, and then: the blocks are a cluster, or not and there are
// at most 128 experts, or more.
constexpr Kernel kKernels[2][3] = {{&RouteFewKernel<1, 4, true>, &RouteFewKernel<1, 4, false>,
                                    &RouteFewKernel<1, kMaxExpertsCuda / 32, false>},
                                   {&RouteFewKernel<2, 4, true>, &RouteFewKernel<2, 4, false>,
                                    &RouteFewKernel<2, kMaxExpertsCuda / 32, false>}};

int NumBlocks(const RouteFewArgs& args) { return (args.config.num_experts + kRows - 1) / kRows; }

bool FitsCluster(const RouteFewArgs& args) {
  return HasSm90() && NumBlocks(args) <= kClusterBlocks;
}

Kernel KernelFor(const RouteFewArgs& args) {
  return kKernels[args.num_tokens > 8][FitsCluster(args)                ? 0
                                       : args.config.num_experts <= 128 ? 1
                                                                        : 2];
}

}  // namespace

bool RoutesFew(const RouteFewArgs& args) {
  return args.num_tokens <= kRouteFewTokens &&
         args.num_tokens * args.config.experts_per_token <= kRouteFewPairs &&
         args.hidden % 8 == 0 && args.router_stride % 8 == 0 && IsAligned16(args.x) &&
         IsAligned16(args.norm) && IsAligned16(args.normed) &&
         SharedBytes(args) <= MaxSharedBytes();
}

cudaError_t LaunchRouteFew(cudaStream_t stream, const RouteFewArgs& args) {
  const Kernel kernel = KernelFor(args);
  const int shared_bytes = SharedBytes(args);
  static const cudaError_t allowed = [] {
    cudaError_t error = cudaSuccess;
    for (const auto& row : kKernels) {
      for (const Kernel any : row) {
        const cudaError_t failed = cudaFuncSetAttribute(
            any, cudaFuncAttributeMaxDynamicSharedMemorySize, MaxSharedBytes());
        if (failed != cudaSuccess) error = failed;
      }
    }
    return error;
  }();
  if (allowed != cudaSuccess) return allowed;
  const int blocks = NumBlocks(args);
  return LaunchEarlyInClusters(stream, kernel, blocks, FitsCluster(args) ? blocks : 1, kThreads,
                               static_cast<size_t>(shared_bytes), args);
}

}  // namespace writescope::kernels
