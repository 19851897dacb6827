// Makes operands of warpgroup products out of tiles; see attend_operands.h. That is a read and a
// write of each key and value, for which every query row of the call then has them at full speed.
#include "engine/kernels/cuda/attend_mma.h"
#include "engine/kernels/cuda/attend_operands.h"
#include "engine/kernels/cuda/attend_tiles.h"

namespace writescope::kernels {

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpLanes;
constexpr int kSteps = 4;  // Of a warp, in keys and in values
static_assert(kWarps * kSteps * kWarpLanes * kChunkBytes == kOperandKeyBytes);
static_assert(kWarps * kSteps * kWarpLanes * kChunkBytes == kOperandValueBytes);

// Steps [first_step, first_step + kSteps) of 16 operand rows whose first word is at `from`.
struct Chunks {
  Words4 chunks[kSteps];

  __device__ void Load(const std::byte* from, int row_words, int lane, int first_step) {
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int word = ChunkWord(lane, first_step + c, i, row_words);
        chunks[c].w[i] = __ldcs(reinterpret_cast<const uint32_t*>(from) + word);
      }
    }
  }
  __device__ void Store(std::byte* slab, int first_row, int lane, int first_chunk) const {
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      const int at = OperandByte(first_row + OperandRow(lane), first_chunk + OperandChunk(lane, c));
      *reinterpret_cast<Words4*>(slab + at) = chunks[c];
    }
  }
};

// A thread block takes one head of one block: a warp has half the dims of a tile of the keys, and
// 16 dims of the values.
__global__ void __launch_bounds__(kThreads)
    MakeOperandsKernel(const __grid_constant__ TileCall call) {
  const int block = blockIdx.x;
  if (block >= call.sizes.num_blocks) return;
  const KvGeometry& kv = call.rows.kv;
  const KvSpan* span = FindSpan(ArraysOf(call), call.sizes.num_spans, block);
  const int in_span = block - span->first_block;
  const std::byte* keys = span->base + in_span * kv.block_bytes() + blockIdx.y * kv.head_bytes();
  const Operands operands = FindOperands(call);
  std::byte* to =
      operands.heads + (int64_t{block} * kv.num_kv_heads + blockIdx.y) * kOperandHeadBytes;
  const int warp = threadIdx.x / kWarpLanes;
  const int lane = threadIdx.x % kWarpLanes;

  Chunks k, v;
  const int tile = warp / 2;
  const int slab = warp % 2;
  k.Load(keys + tile * kTileTokens * kOperandDims * 2, kTileTokens, lane, slab * kSteps);
  v.Load(keys + kv.k_plane_bytes() + warp * kWarpOperandRows * 4, kOperandDims, lane, 0);
  k.Store(to + slab * kKeySlabBytes, tile * kTileTokens, lane, 0);
  v.Store(to + kOperandKeyBytes, warp * kWarpOperandRows, lane, 0);
  if (threadIdx.x == 0 && blockIdx.y == 0) {
    const int left = span->num_tokens - in_span * kBlockTokens;
    operands.places[block] = {static_cast<int>(span->first_position) + in_span * kBlockTokens,
                              left < kBlockTokens ? left : kBlockTokens};
  }
}

}  // namespace

cudaError_t LaunchMakeOperands(cudaStream_t stream, const TileCall& call) {
  const int blocks = call.sizes.num_blocks < 1 ? 1 : call.sizes.num_blocks;
  const dim3 grid(blocks, call.rows.kv.num_kv_heads);
  MakeOperandsKernel<<<grid, kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace writescope::kernels
