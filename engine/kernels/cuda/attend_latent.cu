// Attention where the value is the first part of the key (MLA), bf16: a block of latents is staged
// once and serves as keys and, by byte permutations, as values.
#include "engine/kernels/cuda/attend_latent.h"
#include "engine/kernels/cuda/attend_latent_warp.h"
#include "engine/kernels/cuda/attend_slices.h"
#include "engine/kernels/cuda/attend_tiles.h"

namespace writescope::kernels {
namespace {

using latent::kKDim;
using latent::kLatentBlockBytes;
using latent::kMmaRows;
using latent::kStages;
using latent::kVDim;
using latent::Shared;
using latent::Warp;

constexpr int kLatentTileRows = 64;

template <int kThreads>
__device__ void CopyLatents(const std::byte* from, std::byte* stage) {
  constexpr int kRowChunks = kKeyRowBytes / kChunkBytes;
  const uint32_t to = SharedAddress(stage);
#pragma unroll 8
  for (int at = threadIdx.x; at < kLatentBlockBytes / kChunkBytes; at += kThreads) {
    const int row = at / kRowChunks;  // Of the plane
    const int chunk = SwizzleKeyChunk(row / (kKDim / 2), row % (kKDim / 2), at % kRowChunks);
    CopyAsync16(to + row * kKeyRowBytes + chunk * kChunkBytes, from + at * kChunkBytes);
  }
}

using DecodeShared = Shared<1, 2>;

__global__ void __launch_bounds__(DecodeShared::kThreads, 1)
    AttendLatentSlices(const __grid_constant__ SliceCall call) {
  extern __shared__ __align__(128) std::byte shared_bytes[];
  DecodeShared& shared = *reinterpret_cast<DecodeShared*>(shared_bytes);
  __shared__ SliceQueue queue;
  const int kv_head = blockIdx.y;
  Warp<1, 2> warp(shared);
  const int64_t block_bytes = call.rows.kv.block_bytes();
  const auto copy = [&](const Slice& from, int block, int stage) {
    CopyLatents<DecodeShared::kThreads>(
        from.base + block * block_bytes + kv_head * call.rows.kv.head_bytes(),
        shared.stages[stage]);
  };
  const bool has_work = queue.Begin(call, blockIdx.x);
  LetNextKernelBegin();
  WaitForKernelBefore();
  if (!has_work) return;
  copy(queue.slices[0], 0, 0);
  CommitCopies();
  int stage = 0;
  for (int i = 0; queue.slices[i % 2].num_blocks > 0; ++i) {
    const Slice& slice = queue.slices[i % 2];
    const Slice& next = queue.slices[(i + 1) % 2];
    queue.LookAhead(call, i);
    const int num_slots = slice.panel->num_rows * slice.panel->num_heads;
    warp.StageQueries([&](int slot) {
      return slot < num_slots ? call.rows.q + SlotState(call, slice, kv_head, slot) * kKDim
                              : nullptr;
    });
    warp.Clear();
    int seen[2];  // Tokens of the slice; empty rows see all, and are dropped.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int slot = warp.ScoreRow(h);
      seen[h] = slice.num_tokens;
      if (slot >= num_slots) continue;
      const int64_t visible =
          slice.rows[slot / slice.panel->num_heads].visible - slice.first_position;
      if (visible < seen[h]) seen[h] = static_cast<int>(visible);
    }
    __syncthreads();
    for (int b = 0; b < slice.num_blocks; ++b) {
      if (b + 1 < slice.num_blocks) {
        copy(slice, b + 1, stage ^ 1);
      } else if (next.num_blocks > 0) {
        copy(next, 0, stage ^ 1);
      }
      CommitCopies();
      WaitCopies<1>();
      __syncthreads();
      warp.Attend(stage, /*masked=*/true, [&](int row) {
        return seen[row == warp.ScoreRow(0) ? 0 : 1] - b * kBlockTokens;
      });
      __syncthreads();
      stage ^= 1;
    }
    const int64_t first = PartialIndex(call, queue.sizes, slice.index, kv_head);
    warp.Store([&](int slot) { return slot < num_slots ? first + slot : int64_t{-1}; },
               call.partials.o, call.partials.m, call.partials.l);
    __syncthreads();
  }
}

using PrefillShared = Shared<kLatentTileRows / kMmaRows, 1>;

__global__ void __launch_bounds__(PrefillShared::kThreads, 1)
    AttendLatentTiles(const __grid_constant__ TileCall call) {
  if (static_cast<int>(blockIdx.y) >= call.sizes.num_tiles) return;
  extern __shared__ __align__(128) std::byte shared_bytes[];
  PrefillShared& shared = *reinterpret_cast<PrefillShared*>(shared_bytes);
  // Later tiles see more keys: they begin first.
  const RowTile tile =
      FindRowTile(call, call.sizes.num_tiles - 1 - blockIdx.y, kLatentTileRows, blockIdx.x);
  __shared__ BlockQueue queue;
  queue.Begin(call, tile);
  if (queue.blocks[0].k == nullptr) return;
  CopyLatents<PrefillShared::kThreads>(queue.blocks[0].k, shared.stages[0]);
  CommitCopies();
  const auto state_of = [&](int row) {
    return row < tile.num_pairs ? tile.State(call.rows, row) : int64_t{-1};
  };
  Warp<kLatentTileRows / kMmaRows, 1> warp(shared);
  warp.StageQueries([&](int row) {
    const int64_t at = state_of(row);
    return at >= 0 ? call.rows.q + at * kKDim : nullptr;
  });
  warp.Load(state_of, call.rows.o, call.rows.m, call.rows.l);
  for (int i = 0; queue.blocks[i % 3].k != nullptr; ++i) {
    const HeadBlock& block = queue.blocks[i % 3];
    const HeadBlock& next = queue.blocks[(i + 1) % 3];
    if (next.k != nullptr) {
      CopyLatents<PrefillShared::kThreads>(next.k, shared.stages[(i + 1) % kStages]);
    }
    CommitCopies();
    WaitCopies<1>();
    __syncthreads();
    queue.LookAhead(i);
    const bool masked = block.num_tokens < kBlockTokens ||
                        tile.Position(0) < block.first_position + kBlockTokens - 1;
    warp.Attend(i % kStages, masked, [&](int row) {
      const int64_t seen = tile.Position(row) + 1 - block.first_position;
      return seen < block.num_tokens ? static_cast<int>(seen) : block.num_tokens;
    });
    __syncthreads();
  }
  warp.Store(state_of, call.rows.o, call.rows.m, call.rows.l);
}

template <typename Kernel>
cudaError_t AllowShared(Kernel kernel, size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

cudaError_t PrepareSlices() { return AllowShared(AttendLatentSlices, sizeof(DecodeShared)); }
cudaError_t PrepareTiles() { return AllowShared(AttendLatentTiles, sizeof(PrefillShared)); }

cudaError_t LaunchLatentSlices(cudaStream_t stream, const SliceCall& call) {
  const int chunks = call.sizes.num_chunks < 1 ? 1 : call.sizes.num_chunks;
  const dim3 grid(chunks, call.rows.kv.num_kv_heads);
  return LaunchSlices(stream, &AttendLatentSlices, grid, DecodeShared::kThreads,
                      sizeof(DecodeShared), call);
}

cudaError_t LaunchTiles(cudaStream_t stream, const TileCall& call) {
  const int tiles = call.sizes.num_tiles < 1 ? 1 : call.sizes.num_tiles;
  const dim3 grid(call.rows.kv.num_kv_heads, tiles);
  AttendLatentTiles<<<grid, PrefillShared::kThreads, sizeof(PrefillShared), stream>>>(call);
  return cudaGetLastError();
}

bool Supports(const KvGeometry& kv) {
  return kv.dtype == KvDtype::kBf16 && kv.value_in_key && kv.k_dim == kKDim && kv.v_dim == kVDim;
}

}  // namespace

SliceKernel LatentDecodeKernel(const KvGeometry& kv) {
  SliceKernel kernel;
  kernel.prepare = PrepareSlices;
  kernel.shared_bytes = sizeof(DecodeShared) + sizeof(SliceQueue);
  if (Supports(kv)) kernel.launch = LaunchLatentSlices;
  return kernel;
}

TileKernel LatentPrefillKernel(const KvGeometry& kv) {
  TileKernel kernel;
  kernel.prepare = PrepareTiles;
  kernel.shared_bytes = sizeof(PrefillShared) + sizeof(BlockQueue);
  kernel.tile_rows = kLatentTileRows;
  if (Supports(kv)) kernel.launch = LaunchTiles;
  return kernel;
}

}  // namespace writescope::kernels
