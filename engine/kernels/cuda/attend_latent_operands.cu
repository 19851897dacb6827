// Latents as operands of warpgroup products, head by head; see attend_operands.h. Between the two
// kernels are the products with the heads' matrices.
#include "engine/kernels/cuda/attend_mma.h"
#include "engine/kernels/cuda/attend_operands.h"
#include "engine/kernels/cuda/attend_tiles.h"

namespace writescope::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWordTokens = kTileTokens + 1;  // From a word row to the next: no bank conflicts
constexpr int kLatentWords = kLatentDims / 2;
constexpr int kSharedWords = kOperandRowValues / 2;
constexpr int kKeyWords = kLatentWords + kSharedWords;

// A thread block takes a tile of 16 tokens. What is a word row there (two dims of all tokens) is a
// column here.
__global__ void __launch_bounds__(kThreads)
    TakeLatentsKernel(const __grid_constant__ TileCall call, const LatentRows latents) {
  if (static_cast<int>(blockIdx.x) >= latents.num_blocks) return;
  const int block = latents.first_block + blockIdx.x;
  const KvSpan* span = FindSpan(ArraysOf(call), call.sizes.num_spans, block);
  const int in_span = block - span->first_block;
  const int tile = blockIdx.y;
  const uint32_t* from =
      reinterpret_cast<const uint32_t*>(span->base + in_span * latents.latents.block_bytes()) +
      tile * kTileTokens * kKeyWords;
  __shared__ uint32_t words[kKeyWords * kWordTokens];
#pragma unroll 6
  for (int at = threadIdx.x; at < kKeyWords * kTileTokens; at += kThreads) {
    words[at / kTileTokens * kWordTokens + at % kTileTokens] = __ldcs(from + at);
  }
  __syncthreads();
  const int first_token = tile * kTileTokens;
  uint32_t* rows = reinterpret_cast<uint32_t*>(latents.rows) +
                   (int64_t{blockIdx.x} * kBlockTokens + first_token) * kLatentWords;
#pragma unroll 4
  for (int at = threadIdx.x; at < kLatentWords * kTileTokens; at += kThreads) {
    rows[at] = words[at % kLatentWords * kWordTokens + at / kLatentWords];
  }
  const Operands operands = FindOperands(call);
  std::byte* slab = operands.shared + int64_t{block} * kKeySlabBytes;
  for (int at = threadIdx.x; at < kSharedWords * kTileTokens; at += kThreads) {
    const int token = at / kSharedWords;
    const int word = at % kSharedWords;
    const int byte = OperandByte(first_token + token, word / 4) + word % 4 * 4;
    *reinterpret_cast<uint32_t*>(slab + byte) = words[(kLatentWords + word) * kWordTokens + token];
  }
  if (threadIdx.x == 0 && tile == 0) {
    const int left = span->num_tokens - in_span * kBlockTokens;
    operands.places[block] = {static_cast<int>(span->first_position) + in_span * kBlockTokens,
                              left < kBlockTokens ? left : kBlockTokens};
  }
}

// A thread block takes a head of a block.
__global__ void __launch_bounds__(kThreads)
    PlaceHeadsKernel(const __grid_constant__ TileCall call, const LatentRows latents,
                     const Words4* keys, const Words4* values) {
  constexpr int kHeadChunks = kOperandDims / 8;   // Of a token
  constexpr int kBlockChunks = kBlockTokens / 8;  // Of a dim
  if (static_cast<int>(blockIdx.x) >= latents.num_blocks) return;
  const int heads = call.rows.kv.num_kv_heads;
  const int head = blockIdx.y;
  const int64_t block = latents.first_block + blockIdx.x;
  std::byte* to = FindOperands(call).heads + (block * heads + head) * kOperandHeadBytes;
  const int64_t first_token = int64_t{blockIdx.x} * kBlockTokens;
  keys += (first_token * heads + head) * kHeadChunks;
  values += int64_t{head} * kOperandDims * latents.max_blocks * kBlockChunks +
            int64_t{blockIdx.x} * kBlockChunks;
#pragma unroll
  for (int i = 0; i < kBlockTokens * kHeadChunks / kThreads; ++i) {
    const int at = i * kThreads + threadIdx.x;
    const int token = at / kHeadChunks;
    const int chunk = at % kHeadChunks;
    std::byte* slab = to + chunk / kOperandRowChunks * kKeySlabBytes;
    *reinterpret_cast<Words4*>(slab + OperandByte(token, chunk % kOperandRowChunks)) =
        keys[int64_t{token} * heads * kHeadChunks + chunk];
  }
#pragma unroll
  for (int i = 0; i < kOperandDims * kBlockChunks / kThreads; ++i) {
    const int at = i * kThreads + threadIdx.x;
    const int dim = at / kBlockChunks;
    const int chunk = at % kBlockChunks;
    *reinterpret_cast<Words4*>(to + kOperandKeyBytes + OperandByte(dim, chunk)) =
        values[int64_t{dim} * latents.max_blocks * kBlockChunks + chunk];
  }
}

}  // namespace

cudaError_t LaunchTakeLatents(cudaStream_t stream, const TileCall& call,
                              const LatentRows& latents) {
  const int blocks = latents.num_blocks < 1 ? 1 : latents.num_blocks;
  TakeLatentsKernel<<<dim3(blocks, kBlockTokens / kTileTokens), kThreads, 0, stream>>>(call,
                                                                                       latents);
  return cudaGetLastError();
}

cudaError_t LaunchPlaceHeads(cudaStream_t stream, const TileCall& call, const LatentRows& latents,
                             const std::byte* keys, const std::byte* values) {
  const int blocks = latents.num_blocks < 1 ? 1 : latents.num_blocks;
  const int heads = call.rows.kv.num_kv_heads < 1 ? 1 : call.rows.kv.num_kv_heads;
  PlaceHeadsKernel<<<dim3(blocks, heads), kThreads, 0, stream>>>(
      call, latents, reinterpret_cast<const Words4*>(keys),
      reinterpret_cast<const Words4*>(values));
  return cudaGetLastError();
}

}  // namespace writescope::kernels
