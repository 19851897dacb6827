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
#include "engine/kernels/cuda/attend_warpgroup_rows.h"
#include "engine/kernels/cuda/warpgroup_mma.h"

namespace writescope::kernels {
namespace {

constexpr int kGroupThreads = 128;
constexpr int kConsumers = 2;  // Warpgroups
constexpr int kThreads = (kConsumers + 1) * kGroupThreads;
constexpr int kGroupRows = 64;
constexpr int kTileRows = kConsumers * kGroupRows;
// The warpgroups share out the registers that the thread block starts with, 168 of each thread.
// With more the request would wait for ever.
constexpr int kStartRegisters = 168;
constexpr int kConsumerRegisters = 240;
constexpr int kProducerRegisters = 24;
static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <=
              (kConsumers + 1) * kStartRegisters);

// What is called a slab has 64 values of each row.
constexpr int kQuerySlabBytes = kGroupRows * kOperandRowBytes;
constexpr int kItemSlabBytes = kItemBlocks * kKeySlabBytes;
constexpr int kValueBytes = kItemBlocks * kOperandValueBytes;
constexpr int kAlignment = 1024;  // Of swizzled operands

// Keys of 128 dims, or of 192, of which the heads share the last 64.
template <int kDims>
struct Shape {
  static constexpr int kKeyDims = kDims;
  static constexpr int kSlabs = kDims / kOperandRowValues;
  static constexpr int kHeadSlabs = kOperandDims / kOperandRowValues;
  static constexpr int kQueryBytes = kSlabs * kQuerySlabBytes;  // Of a warpgroup
  static constexpr int kKeyBytes = kSlabs * kItemSlabBytes;
  static constexpr int kStages = kDims == kOperandDims ? 3 : 2;
  static constexpr int kSharedBytes =
      kAlignment + kConsumers * kQueryBytes + kStages * (kKeyBytes + kValueBytes);
};

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
template <typename S>
struct Stages {
  StageBarriers* barriers;
  std::byte* keys;
  std::byte* values;

  __device__ Stage At(int stage) const {
    return {barriers + stage, keys + stage * S::kKeyBytes, values + stage * kValueBytes};
  }
};

// The stage of an item, and the parity of the phases in which it is filled.
template <typename S>
struct StageCounter {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void Next() {
    if (++stage == S::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// --- The producer: one warp, of which one lane copies.

// Where there is no second block (-1) it is the first again, without tokens.
template <typename S>
__device__ inline void CopyItem(const Operands& operands, int num_kv_heads, int kv_head,
                                const int (&blocks)[kItemBlocks], const Stage& stage,
                                uint32_t parity) {
  StageBarriers& barriers = *stage.barriers;
  constexpr int kSharedSlabs = S::kSlabs - S::kHeadSlabs;
  const std::byte* from[kItemBlocks];
  const std::byte* shared[kItemBlocks];
#pragma unroll
  for (int b = 0; b < kItemBlocks; ++b) {
    const int64_t block = blocks[b] < 0 ? blocks[0] : blocks[b];
    from[b] = operands.heads + (block * num_kv_heads + kv_head) * kOperandHeadBytes;
    shared[b] = operands.shared + block * kSharedSlabs * kKeySlabBytes;
  }
  WaitBarrier(&barriers.keys_empty, parity ^ 1);
#pragma unroll
  for (int b = 0; b < kItemBlocks; ++b) {
    barriers.places[b] = blocks[b] < 0 ? BlockPlace{0, 0} : operands.places[blocks[b]];
  }
  ArriveExpecting(&barriers.keys_full, S::kKeyBytes);
#pragma unroll
  for (int b = 0; b < kItemBlocks; ++b) {
#pragma unroll
    for (int slab = 0; slab < S::kSlabs; ++slab) {
      const std::byte* keys = slab < S::kHeadSlabs
                                  ? from[b] + slab * kKeySlabBytes
                                  : shared[b] + (slab - S::kHeadSlabs) * kKeySlabBytes;
      CopyBulk(stage.keys + slab * kItemSlabBytes + b * kKeySlabBytes, keys, kKeySlabBytes,
               &barriers.keys_full);
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
template <typename S>
__device__ inline void Produce(const TileCall& call, const RowTile& tile, const Stages<S>& stages) {
  const int lane = threadIdx.x % kWarpLanes;
  const Operands operands = FindOperands(call);
  const int64_t last_position = tile.Position(tile.num_pairs - 1);
  const TileReader* next_reader = tile.reader + 1;
  const int end = next_reader == ArraysOf(call).readers + call.sizes.num_readers
                      ? call.sizes.num_blocks
                      : next_reader->first_block;
  StageCounter<S> at;
  int pending = -1;
  const auto copy = [&](int second) {
    if (lane == 0) {
      CopyItem<S>(operands, call.rows.kv.num_kv_heads, tile.kv_head, {pending, second},
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

// Named barriers of the thread block: of each warpgroup a turn, then one of its own.
constexpr int kTurnBarrier = 1;
constexpr int kGroupBarrier = kTurnBarrier + kConsumers;
__device__ inline void SyncNamed(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void ArriveNamed(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Queries of the warpgroup's rows as an operand: a lane takes 8 values of a row at a time.
template <typename S>
__device__ inline void StageQueries(const AttendRows& rows, const RowTile& tile, int group_row,
                                    std::byte* queries) {
  constexpr int kRowChunks = S::kKeyDims / 8;
#pragma unroll 4
  for (int at = threadIdx.x % kGroupThreads; at < kGroupRows * kRowChunks; at += kGroupThreads) {
    const int row = at / kRowChunks;
    const int chunk = at % kRowChunks;
    Words4 words = {};
    if (group_row + row < tile.num_pairs) {
      const float4* from = reinterpret_cast<const float4*>(
          rows.q + tile.State(rows, group_row + row) * S::kKeyDims + chunk * 8);
      const float4 low = from[0], high = from[1];
      words = {PackBf16(low.x, low.y), PackBf16(low.z, low.w), PackBf16(high.x, high.y),
               PackBf16(high.z, high.w)};
    }
    std::byte* slab = queries + chunk / kOperandRowChunks * kQuerySlabBytes;
    *reinterpret_cast<Words4*>(slab + OperandByte(row, chunk % kOperandRowChunks)) = words;
  }
}

// A thread's part in a warpgroup's way through the items.
template <typename S>
struct Consumer {
  const Stages<S>& stages;
  const int group;
  const int lane;
  // Operands in shared memory
  uint64_t queries;
  uint64_t keys;
  uint64_t values;
  // Positions below these are seen by the lane's rows, and by all rows of its warp.
  int visible[2];
  int visible_to_all;
  RowState state;
  // Of the item in work
  BlockPlace blocks[kItemBlocks];
  float s[64];
  uint32_t p[8][4];
  float factors[2];
  StageCounter<S> at;      // Of the keys
  StageCounter<S> before;  // Of the values

  // False at the end. A vote, so that the compiler knows that all lanes go the same way.
  __device__ bool WaitForKeys() {
    StageBarriers& barriers = stages.barriers[at.stage];
    WaitBarrier(&barriers.keys_full, at.parity);
#pragma unroll
    for (int b = 0; b < kItemBlocks; ++b) blocks[b] = barriers.places[b];
    return __any_sync(~0u, blocks[0].num_tokens == 0) == 0;
  }

  __device__ void IssueScores() {
    FenceMmaGroup();
#pragma unroll
    for (int step = 0; step < S::kKeyDims / kStepDims; ++step) {
      const int slab = step / 4, along = step % 4 * 2;
      MmaGroup(s, queries + slab * (kQuerySlabBytes / 16) + along,
               keys + at.stage * (S::kKeyBytes / 16) + slab * (kItemSlabBytes / 16) + along,
               step > 0);
    }
    CommitMmaGroup();
  }

  __device__ void IssueValues() {
    WaitBarrier(&stages.barriers[before.stage].values_full, before.parity);
    FenceMmaGroup();
#pragma unroll
    for (int step = 0; step < kItemTokens / kStepDims; ++step) {
      const int slab = step / 4, along = step % 4 * 2;
      MmaGroup(
          state.o, p[step],
          values + before.stage * (kValueBytes / 16) + slab * (kOperandValueBytes / 16) + along);
    }
    CommitMmaGroup();
  }

  // Products of the two warpgroups in turn: else both would wait for their softmax at once. A
  // barrier of each is met by both, the one that waits and the one that gives way.
  __device__ void TakeTurn() { SyncNamed(kTurnBarrier + group, kConsumers * kGroupThreads); }
  __device__ void GiveTurn() { ArriveNamed(kTurnBarrier + 1 - group, kConsumers * kGroupThreads); }

  // By every lane: one for its warp takes no less time, and tools that look for races see what it
  // says of itself only.
  __device__ void ReleaseKeys() { Arrive(&stages.barriers[at.stage].keys_empty); }
  __device__ void ReleaseValues() {
    Arrive(&stages.barriers[before.stage].values_empty);
    before.Next();
  }

  // Of the item's scores; true where the output has to be rescaled.
  __device__ bool MaskAndWeigh() {
    bool partly = false;
#pragma unroll
    for (int b = 0; b < kItemBlocks; ++b) {
      partly |= blocks[b].num_tokens < kBlockTokens ||
                visible_to_all < blocks[b].first_position + kBlockTokens;
    }
    if (__any_sync(~0u, partly)) Mask(s, blocks, lane, visible);
    return Weigh(s, state, factors);
  }

  // The weights take the place of the item before, which is done.
  __device__ void EndItem(bool moved) {
    if (moved) Rescale(factors, state);  // Maxima soon stop moving.
    PackItem(s, p);
    at.Next();
  }

  // False where there is no item at all, and so nothing to store.
  __device__ bool Run() {
    if (!WaitForKeys()) return false;
    if (group == 1) GiveTurn();
    TakeTurn();
    IssueScores();
    GiveTurn();
    WaitMmaGroups<0>();
    ReleaseKeys();
    EndItem(MaskAndWeigh());
    while (WaitForKeys()) {
      TakeTurn();
      IssueScores();
      IssueValues();
      GiveTurn();
      WaitMmaGroups<1>();
      ReleaseKeys();
      const bool moved = MaskAndWeigh();
      WaitMmaGroups<0>();
      ReleaseValues();
      EndItem(moved);
    }
    // Every turn that was given is taken.
    if (group == 0) TakeTurn();
    IssueValues();
    WaitMmaGroups<0>();
    return true;
  }
};

template <typename S>
__device__ inline void Consume(const TileCall& call, const RowTile& tile, std::byte* queries,
                               const Stages<S>& stages) {
  const int group = threadIdx.x / kGroupThreads;
  const int lane = threadIdx.x % kWarpLanes;
  const int group_row = group * kGroupRows;
  const int warp_row = group_row + threadIdx.x % kGroupThreads / kWarpLanes * 16;
  queries += group * S::kQueryBytes;
  StageQueries<S>(call.rows, tile, group_row, queries);
  FenceAsyncProxy();
  SyncNamed(kGroupBarrier + group, kGroupThreads);

  Consumer<S> consumer{.stages = stages, .group = group, .lane = lane};
  consumer.queries = SwizzledOperand(SharedAddress(queries));
  consumer.keys = SwizzledOperand(SharedAddress(stages.keys));
  consumer.values = SwizzledOperand(SharedAddress(stages.values));
  LoadState(call.rows, tile, warp_row, lane, consumer.state);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    consumer.visible[h] =
        static_cast<int>(tile.Position(warp_row + AccumulatorRow(lane, 2 * h))) + 1;
  }
  // Rows of a tile are in the order of positions: the warp's first sees the least.
  consumer.visible_to_all = static_cast<int>(tile.Position(warp_row)) + 1;
  if (consumer.Run()) StoreState(consumer.state, tile, warp_row, lane, call.rows);
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1)
    AttendWarpgroupKernel(const __grid_constant__ TileCall call) {
  if (static_cast<int>(blockIdx.y) >= call.sizes.num_tiles) return;
  extern __shared__ std::byte shared_bytes[];
  __shared__ StageBarriers barriers[S::kStages];
  std::byte* queries =
      shared_bytes + (kAlignment - SharedAddress(shared_bytes) % kAlignment) % kAlignment;
  Stages<S> stages;
  stages.barriers = barriers;
  stages.keys = queries + kConsumers * S::kQueryBytes;
  stages.values = stages.keys + S::kStages * S::kKeyBytes;
  if (threadIdx.x < S::kStages) {
    StageBarriers& mine = barriers[threadIdx.x];
    InitBarrier(&mine.keys_full, 1);
    InitBarrier(&mine.values_full, 1);
    InitBarrier(&mine.keys_empty, kConsumers * kGroupThreads);
    InitBarrier(&mine.values_empty, kConsumers * kGroupThreads);
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

using Plain = Shape<kOperandDims>;
using Latent = Shape<kOperandDims + kOperandRowValues>;

template <typename S>
cudaError_t Prepare() {
  return cudaFuncSetAttribute(AttendWarpgroupKernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              S::kSharedBytes);
}

template <typename S>
cudaError_t Launch(cudaStream_t stream, const TileCall& call) {
  const int tiles = call.sizes.num_tiles < 1 ? 1 : call.sizes.num_tiles;
  const dim3 grid(call.rows.kv.num_kv_heads, tiles);
  AttendWarpgroupKernel<S><<<grid, kThreads, S::kSharedBytes, stream>>>(call);
  return cudaGetLastError();
}

cudaError_t LaunchPlain(cudaStream_t stream, const TileCall& call) {
  const cudaError_t error = LaunchMakeOperands(stream, call);
  return error != cudaSuccess ? error : Launch<Plain>(stream, call);
}

template <typename S>
TileKernel Make(cudaError_t (*launch)(cudaStream_t, const TileCall&), const KvGeometry& kv) {
  TileKernel kernel;
  kernel.prepare = Prepare<S>;
  kernel.launch = launch;
  kernel.shared_bytes = S::kSharedBytes + sizeof(StageBarriers) * S::kStages;
  kernel.tile_rows = kTileRows;
  kernel.scratch_block_bytes = OperandBlockBytes(kv);
  return kernel;
}

}  // namespace

TileKernel WarpgroupPrefillKernel(const KvGeometry& kv) {
  if (!WRITESCOPE_WITH_WARPGROUPS) return {};
  if (kv.value_in_key || kv.dtype != KvDtype::kBf16) return {};
  if (kv.k_dim != kOperandDims || kv.v_dim != kOperandDims) return {};
  return Make<Plain>(LaunchPlain, kv);
}

TileKernel LatentHeadsKernel(const KvGeometry& heads) {
  if (!WRITESCOPE_WITH_WARPGROUPS) return {};
  if (heads.k_dim != Latent::kKeyDims || heads.v_dim != kOperandDims) return {};
  return Make<Latent>(Launch<Latent>, heads);
}

}  // namespace writescope::kernels
