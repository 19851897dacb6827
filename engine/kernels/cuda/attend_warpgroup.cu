// Attention of many rows of a reader on the warpgroup products of H100 and H200 (sm_90a). The keys
// and values of a call become operands in a scratch first (attend_operands.h). A thread block has
// two warpgroups of 64 (row, head) pairs each: one's softmax is hidden behind the other's products,
// and behind its own products of the blocks before. A warp copies operands some blocks ahead.
#include "engine/kernels/cuda/async_copy.h"
#include "engine/kernels/cuda/attend_launch.h"
#include "engine/kernels/cuda/attend_mma.h"
#include "engine/kernels/cuda/attend_operands.h"
#include "engine/kernels/cuda/attend_tiles.h"
#include "engine/kernels/cuda/attend_warpgroup_maps.h"
#include "engine/kernels/cuda/warpgroup_mma.h"

namespace writescope::kernels {
namespace {

constexpr int kGroupThreads = 128;
constexpr int kGroupWarps = kGroupThreads / kWarpLanes;
constexpr int kConsumers = 2;  // Warpgroups
constexpr int kThreads = (kConsumers + 1) * kGroupThreads;
constexpr int kGroupRows = 64;
constexpr int kTileRows = kConsumers * kGroupRows;
constexpr int kDims = kOperandDims;
constexpr int kItemBlocks = 2;
constexpr int kItemTokens = kItemBlocks * kBlockTokens;
// The warpgroups share out the registers that the thread block starts with, 168 of each thread.
// With more the request would wait for ever.
constexpr int kStartRegisters = 168;
constexpr int kConsumerRegisters = 240;
constexpr int kProducerRegisters = 24;
static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <=
              (kConsumers + 1) * kStartRegisters);

// What is called a slab has 64 values of each row.
constexpr int kSlabs = kDims / kOperandRowValues;
constexpr int kQuerySlabBytes = kGroupRows * kOperandRowBytes;
constexpr int kItemSlabBytes = kItemBlocks * kKeySlabBytes;
constexpr int kQueryBytes = kSlabs * kQuerySlabBytes;  // Of a warpgroup
constexpr int kKeyBytes = kSlabs * kItemSlabBytes;
constexpr int kValueBytes = kItemBlocks * kOperandValueBytes;
constexpr int kStages = 3;
constexpr int kAlignment = 1024;  // Of swizzled operands
constexpr int kSharedBytes =
    kAlignment + kConsumers * kQueryBytes + kStages * (kKeyBytes + kValueBytes);

struct StageBarriers {
  uint64_t keys_full, keys_empty;
  uint64_t values_full, values_empty;
  BlockPlace places[kItemBlocks];  // No tokens in the first: the end
};

struct Stage {
  StageBarriers* barriers;
  std::byte* keys;
  std::byte* values;
};

// The stages of a thread block, which items take in turn.
struct Stages {
  StageBarriers* barriers;
  std::byte* keys;
  std::byte* values;

  __device__ Stage At(int stage) const {
    return {barriers + stage, keys + stage * kKeyBytes, values + stage * kValueBytes};
  }
};

// The stage of an item, and the parity of the phases in which it is filled.
struct StageCounter {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void Next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// --- The producer: one warp, of which one lane copies.

// Where there is no second block (-1) it is the first again, without tokens.
__device__ inline void CopyItem(const Operands& operands, int num_kv_heads, int kv_head,
                                const int (&blocks)[kItemBlocks], const Stage& stage,
                                uint32_t parity) {
  StageBarriers& barriers = *stage.barriers;
  const std::byte* from[kItemBlocks];
#pragma unroll
  for (int b = 0; b < kItemBlocks; ++b) {
    const int64_t block = blocks[b] < 0 ? blocks[0] : blocks[b];
    from[b] = operands.heads + (block * num_kv_heads + kv_head) * kOperandHeadBytes;
  }
  WaitBarrier(&barriers.keys_empty, parity ^ 1);
#pragma unroll
  for (int b = 0; b < kItemBlocks; ++b) {
    barriers.places[b] = blocks[b] < 0 ? BlockPlace{0, 0} : operands.places[blocks[b]];
  }
  ArriveExpecting(&barriers.keys_full, kKeyBytes);
#pragma unroll
  for (int b = 0; b < kItemBlocks; ++b) {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      CopyBulk(stage.keys + slab * kItemSlabBytes + b * kKeySlabBytes,
               from[b] + slab * kKeySlabBytes, kKeySlabBytes, &barriers.keys_full);
    }
  }
  WaitBarrier(&barriers.values_empty, parity ^ 1);
  ArriveExpecting(&barriers.values_full, kValueBytes);
#pragma unroll
  for (int b = 0; b < kItemBlocks; ++b) {
    CopyBulk(stage.values + b * kOperandValueBytes, from[b] + kOperandKeyBytes, kOperandValueBytes,
             &barriers.values_full);
  }
}

// The blocks of the reader that the thread block's last row sees, two by two.
__device__ inline void Produce(const TileCall& call, const RowTile& tile, const Stages& stages) {
  const int lane = threadIdx.x % kWarpLanes;
  const Operands operands = FindOperands(call);
  const int64_t last_position = tile.Position(tile.num_pairs - 1);
  const TileReader* next_reader = tile.reader + 1;
  const int end = next_reader == ArraysOf(call).readers + call.sizes.num_readers
                      ? call.sizes.num_blocks
                      : next_reader->first_block;
  StageCounter at;
  int pending = -1;
  const auto copy = [&](int second) {
    if (lane == 0) {
      CopyItem(operands, call.rows.kv.num_kv_heads, tile.kv_head, {pending, second},
               stages.At(at.stage), at.parity);
    }
    pending = -1;
    at.Next();
  };
  for (int first = tile.reader->first_block; first < end; first += kWarpLanes) {
    const int block = first + lane;
    const bool seen = block < end && operands.places[block].first_position <= last_position;
    for (uint32_t left = __ballot_sync(~0u, seen); left != 0; left &= left - 1) {
      const int next = first + __ffs(static_cast<int>(left)) - 1;
      if (pending < 0) {
        pending = next;
      } else {
        copy(next);
      }
    }
  }
  if (pending >= 0) copy(-1);
  if (lane != 0) return;
  StageBarriers& last = *stages.At(at.stage).barriers;
  WaitBarrier(&last.keys_empty, at.parity ^ 1);
  last.places[0] = {0, 0};
  Arrive(&last.keys_full);
}

// --- The consumers.

// Named barriers of the thread block.
__device__ inline void SyncNamed(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void ArriveNamed(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Of the lane's rows, g and g + 8 of its warp's 16.
struct RowState {
  float o[64];
  float m[2];
  float l[2];  // Of this lane's tokens
};

__device__ inline void LoadState(const AttendRows& rows, const RowTile& tile, int first_row,
                                 int lane, RowState& state) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + AccumulatorRow(lane, 2 * h);
    const bool valid = row < tile.num_pairs;
    const int64_t at = valid ? tile.State(rows, row) : 0;
    state.m[h] = valid ? rows.m[at] : kMinusInf;
    state.l[h] = valid && LaneT(lane) == 0 ? rows.l[at] : 0;
#pragma unroll
    for (int j = 0; j < kDims / 8; ++j) {
      float2 o = make_float2(0, 0);
      if (state.m[h] != kMinusInf) {
        o = *reinterpret_cast<const float2*>(rows.o + at * kDims + ProductColumn(lane, 4 * j));
      }
      state.o[4 * j + 2 * h] = o.x;
      state.o[4 * j + 2 * h + 1] = o.y;
    }
  }
}

__device__ inline void StoreState(const RowState& state, const RowTile& tile, int first_row,
                                  int lane, const AttendRows& rows) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float l = SumOfQuad(state.l[h]);
    const int row = first_row + AccumulatorRow(lane, 2 * h);
    if (row >= tile.num_pairs) continue;
    const int64_t at = tile.State(rows, row);
    if (LaneT(lane) == 0) {
      rows.m[at] = state.m[h];
      rows.l[at] = l;
    }
#pragma unroll
    for (int j = 0; j < kDims / 8; ++j) {
      *reinterpret_cast<float2*>(rows.o + at * kDims + ProductColumn(lane, 4 * j)) =
          make_float2(state.o[4 * j + 2 * h], state.o[4 * j + 2 * h + 1]);
    }
  }
}

// Queries of the warpgroup's rows as an operand: a lane takes 8 values of a row at a time.
__device__ inline void StageQueries(const AttendRows& rows, const RowTile& tile, int group_row,
                                    std::byte* queries) {
  constexpr int kRowChunks = kDims / 8;
#pragma unroll 4
  for (int at = threadIdx.x % kGroupThreads; at < kGroupRows * kRowChunks; at += kGroupThreads) {
    const int row = at / kRowChunks;
    const int chunk = at % kRowChunks;
    Words4 words = {};
    if (group_row + row < tile.num_pairs) {
      const float4* from = reinterpret_cast<const float4*>(
          rows.q + tile.State(rows, group_row + row) * kDims + chunk * 8);
      const float4 low = from[0], high = from[1];
      words = {PackBf16(low.x, low.y), PackBf16(low.z, low.w), PackBf16(high.x, high.y),
               PackBf16(high.z, high.w)};
    }
    std::byte* slab = queries + chunk / kOperandRowChunks * kQuerySlabBytes;
    *reinterpret_cast<Words4*>(slab + OperandByte(row, chunk % kOperandRowChunks)) = words;
  }
}

// Tokens of an item that the lane's rows do not see, or that are none.
__device__ inline void Mask(float (&s)[64], const BlockPlace (&blocks)[kItemBlocks], int lane,
                            const int (&visible)[2]) {
#pragma unroll
  for (int b = 0; b < kItemBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int seen = visible[h] - blocks[b].first_position;
      const int limit = seen < blocks[b].num_tokens ? seen : blocks[b].num_tokens;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (ProductColumn(lane, 4 * j + c) >= limit) s[32 * b + 4 * j + 2 * h + c] = kMinusInf;
        }
      }
    }
  }
}

// Scores become weights, the maxima and sums move on; `factors` is what the output is to be
// multiplied with. True where any lane's is not one.
__device__ inline bool Weigh(float (&s)[64], RowState& state, float (&factors)[2]) {
  bool moved = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float best[2] = {s[2 * h], s[2 * h + 1]};
#pragma unroll
    for (int j = 1; j < 16; ++j) {
      best[0] = fmaxf(best[0], s[4 * j + 2 * h]);
      best[1] = fmaxf(best[1], s[4 * j + 2 * h + 1]);
    }
    const float m_new = fmaxf(MaxOfQuad(fmaxf(best[0], best[1])), state.m[h]);
    const float base = m_new == kMinusInf ? 0 : m_new;  // (-inf) - (-inf) would be NaN.
    factors[h] = FastExp2(state.m[h] - base);
    moved |= state.m[h] != m_new;
    state.m[h] = m_new;
    float sum[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      sum[0] += s[4 * j + 2 * h] = FastExp2(s[4 * j + 2 * h] - base);
      sum[1] += s[4 * j + 2 * h + 1] = FastExp2(s[4 * j + 2 * h + 1] - base);
    }
    state.l[h] = state.l[h] * factors[h] + (sum[0] + sum[1]);
  }
  return __any_sync(~0u, moved);
}

__device__ inline void Rescale(const float (&factors)[2], RowState& state) {
#pragma unroll
  for (int i = 0; i < 64; ++i) state.o[i] *= factors[i / 2 % 2];
}

// Weights of 128 tokens as A operands of 16 tokens each.
__device__ inline void PackItem(const float (&s)[64], uint32_t (&p)[8][4]) {
#pragma unroll
  for (int step = 0; step < 8; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[step][i] = PackBf16(s[WeightIndex(step, i, 0)], s[WeightIndex(step, i, 1)]);
    }
  }
}

__device__ inline void IssueScores(uint64_t queries, uint64_t keys, float (&s)[64]) {
#pragma unroll
  for (int step = 0; step < kDims / kStepDims; ++step) {
    const int slab = step / 4, along = step % 4 * 2;
    MmaGroup(s, queries + slab * (kQuerySlabBytes / 16) + along,
             keys + slab * (kItemSlabBytes / 16) + along, step > 0);
  }
}

__device__ inline void IssueValues(const uint32_t (&p)[8][4], uint64_t values, float (&o)[64]) {
#pragma unroll
  for (int step = 0; step < kItemTokens / kStepDims; ++step) {
    const int slab = step / 4, along = step % 4 * 2;
    MmaGroup(o, p[step], values + slab * (kOperandValueBytes / 16) + along);
  }
}

__device__ inline void Release(uint64_t* empty, int lane) {
  __syncwarp();
  if (lane == 0) Arrive(empty);
}

__device__ inline void Consume(const TileCall& call, const RowTile& tile, std::byte* queries,
                               const Stages& stages) {
  constexpr int kTurnBarrier = 1;  // And the next ones: by warpgroup
  constexpr int kGroupBarrier = kTurnBarrier + kConsumers;
  const int group = threadIdx.x / kGroupThreads;
  const int lane = threadIdx.x % kWarpLanes;
  const int group_row = group * kGroupRows;
  const int warp_row = group_row + threadIdx.x % kGroupThreads / kWarpLanes * 16;

  queries += group * kQueryBytes;
  StageQueries(call.rows, tile, group_row, queries);
  PublishToTensorCores();
  SyncNamed(kGroupBarrier + group, kGroupThreads);
  const uint64_t query_operand = SwizzledOperand(SharedAddress(queries));
  const uint64_t key_operand = SwizzledOperand(SharedAddress(stages.keys));
  const uint64_t value_operand = SwizzledOperand(SharedAddress(stages.values));
  RowState state;
  LoadState(call.rows, tile, warp_row, lane, state);
  int visible[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    visible[h] = static_cast<int>(tile.Position(warp_row + AccumulatorRow(lane, 2 * h))) + 1;
  }
  // Rows of a tile are in the order of positions: the warp's first sees the least.
  const int visible_to_all = static_cast<int>(tile.Position(warp_row)) + 1;

  float s[64];
  uint32_t p[8][4];
  float factors[2];
  BlockPlace blocks[kItemBlocks];
  StageCounter at;      // Of the keys
  StageCounter before;  // Of the values
  // True at the end. A vote, so that the compiler knows that all lanes go the same way.
  const auto wait_for_keys = [&] {
    StageBarriers& barriers = stages.barriers[at.stage];
    WaitBarrier(&barriers.keys_full, at.parity);
#pragma unroll
    for (int b = 0; b < kItemBlocks; ++b) blocks[b] = barriers.places[b];
    return __any_sync(~0u, blocks[0].num_tokens == 0) != 0;
  };
  const auto issue_scores = [&] {
    FenceMmaGroup();
    IssueScores(query_operand, key_operand + at.stage * (kKeyBytes / 16), s);
    CommitMmaGroup();
  };
  const auto issue_values = [&] {
    WaitBarrier(&stages.barriers[before.stage].values_full, before.parity);
    FenceMmaGroup();
    IssueValues(p, value_operand + before.stage * (kValueBytes / 16), state.o);
    CommitMmaGroup();
  };
  const auto mask = [&] {
    bool partly = false;
#pragma unroll
    for (int b = 0; b < kItemBlocks; ++b) {
      partly |= blocks[b].num_tokens < kBlockTokens ||
                visible_to_all < blocks[b].first_position + kBlockTokens;
    }
    if (__any_sync(~0u, partly)) Mask(s, blocks, lane, visible);
  };
  // Products of the two warpgroups in turn: else both would wait for their softmax at once.
  const auto take_turn = [&] { SyncNamed(kTurnBarrier + group, kConsumers * kGroupThreads); };
  const auto give_turn = [&] { ArriveNamed(kTurnBarrier + 1 - group, kConsumers * kGroupThreads); };

  if (wait_for_keys()) return;
  if (group == 1) give_turn();
  take_turn();
  issue_scores();
  give_turn();
  WaitMmaGroups<0>();
  Release(&stages.barriers[at.stage].keys_empty, lane);
  mask();
  if (Weigh(s, state, factors)) Rescale(factors, state);
  PackItem(s, p);
  at.Next();
  while (!wait_for_keys()) {
    take_turn();
    issue_scores();
    issue_values();
    give_turn();
    WaitMmaGroups<1>();
    Release(&stages.barriers[at.stage].keys_empty, lane);
    mask();
    const bool moved = Weigh(s, state, factors);
    WaitMmaGroups<0>();
    Release(&stages.barriers[before.stage].values_empty, lane);
    before.Next();
    // Maxima soon stop moving.
    if (moved) Rescale(factors, state);
    PackItem(s, p);
    at.Next();
  }
  // Every turn that was given is taken.
  if (group == 0) take_turn();
  issue_values();
  WaitMmaGroups<0>();
  StoreState(state, tile, warp_row, lane, call.rows);
}

__global__ void __launch_bounds__(kThreads, 1)
    AttendWarpgroupKernel(const __grid_constant__ TileCall call) {
  if (static_cast<int>(blockIdx.y) >= call.sizes.num_tiles) return;
  extern __shared__ std::byte shared_bytes[];
  __shared__ StageBarriers barriers[kStages];
  std::byte* queries =
      shared_bytes + (kAlignment - SharedAddress(shared_bytes) % kAlignment) % kAlignment;
  Stages stages;
  stages.barriers = barriers;
  stages.keys = queries + kConsumers * kQueryBytes;
  stages.values = stages.keys + kStages * kKeyBytes;
  if (threadIdx.x < kStages) {
    StageBarriers& mine = barriers[threadIdx.x];
    InitBarrier(&mine.keys_full, 1);
    InitBarrier(&mine.values_full, 1);
    InitBarrier(&mine.keys_empty, kConsumers * kGroupWarps);
    InitBarrier(&mine.values_empty, kConsumers * kGroupWarps);
    PublishBarriers();
  }
  __syncthreads();
  // Later tiles see more keys: they begin first.
  const RowTile tile =
      FindRowTile(call, call.sizes.num_tiles - 1 - blockIdx.y, kTileRows, blockIdx.x);
  if (threadIdx.x / kGroupThreads == kConsumers) {
    ShrinkRegisters<kProducerRegisters>();
    if (threadIdx.x % kGroupThreads < kWarpLanes) Produce(call, tile, stages);
  } else {
    GrowRegisters<kConsumerRegisters>();
    Consume(call, tile, queries, stages);
  }
}

cudaError_t Prepare() {
  return cudaFuncSetAttribute(AttendWarpgroupKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              kSharedBytes);
}

cudaError_t Launch(cudaStream_t stream, const TileCall& call) {
  const cudaError_t error = LaunchMakeOperands(stream, call);
  if (error != cudaSuccess) return error;
  const int tiles = call.sizes.num_tiles < 1 ? 1 : call.sizes.num_tiles;
  const dim3 grid(call.rows.kv.num_kv_heads, tiles);
  AttendWarpgroupKernel<<<grid, kThreads, kSharedBytes, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace

TileKernel WarpgroupPrefillKernel(const KvGeometry& kv) {
  TileKernel kernel;
  if (!WRITESCOPE_WITH_WARPGROUPS) return kernel;
  if (kv.value_in_key || kv.dtype != KvDtype::kBf16) return kernel;
  if (kv.k_dim != kDims || kv.v_dim != kDims) return kernel;
  kernel.prepare = Prepare;
  kernel.launch = Launch;
  kernel.shared_bytes = kSharedBytes + sizeof(StageBarriers) * kStages;
  kernel.tile_rows = kTileRows;
  kernel.scratch_block_bytes = OperandBlockBytes(kv);
  return kernel;
}

}  // namespace writescope::kernels
