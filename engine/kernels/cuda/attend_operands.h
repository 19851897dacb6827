// The scratch in which the warpgroup kernel finds keys and values as operands, block by block in
// the order of the call's spans: for each head of a block the keys, then the values, as
// attend_warpgroup_maps.h lays them out; behind all of them what keys have more than 128 dims,
// which the heads share (MLA's rope part), and where each block's tokens are.
#pragma once

#include <cuda_runtime_api.h>

#include "engine/kernels/cuda/attend_warpgroup_maps.h"
#include "engine/kernels/cuda/attend_work.h"

namespace writescope::kernels {

// The heads that it is for, but for what they share.
inline constexpr int kOperandDims = 128;
inline constexpr int kOperandKeyBytes = kOperandDims / kOperandRowValues * kKeySlabBytes;
inline constexpr int kOperandValueBytes = kOperandDims * kOperandRowBytes;
inline constexpr int kOperandHeadBytes = kOperandKeyBytes + kOperandValueBytes;

struct BlockPlace {
  int32_t first_position;
  int32_t num_tokens;
};

WRITESCOPE_HOST_DEVICE constexpr int SharedKeyBytes(const KvGeometry& kv) {
  return (kv.k_dim - kOperandDims) / kOperandRowValues * kKeySlabBytes;
}
WRITESCOPE_HOST_DEVICE constexpr int64_t OperandBlockBytes(const KvGeometry& kv) {
  return int64_t{kv.num_kv_heads} * kOperandHeadBytes + SharedKeyBytes(kv) +
         int64_t{sizeof(BlockPlace)};
}

struct Operands {
  std::byte* heads;   // [num_blocks][num_kv_heads][kOperandHeadBytes]
  std::byte* shared;  // [num_blocks][SharedKeyBytes]
  BlockPlace* places;
};
WRITESCOPE_HOST_DEVICE inline Operands FindOperands(const TileCall& call) {
  const KvGeometry& kv = call.rows.kv;
  Operands operands;
  operands.heads = call.scratch;
  operands.shared =
      operands.heads + int64_t{call.sizes.num_blocks} * kv.num_kv_heads * kOperandHeadBytes;
  operands.places = reinterpret_cast<BlockPlace*>(operands.shared + int64_t{call.sizes.num_blocks} *
                                                                        SharedKeyBytes(kv));
  return operands;
}

// Fills the scratch of a call.
cudaError_t LaunchMakeOperands(cudaStream_t stream, const TileCall& call);

// The same where the spans hold latents, which become the keys and values of heads by products with
// their matrices, some blocks at a time: the latents of blocks [first_block, first_block +
// num_blocks) of the call as rows, with what all heads share and the places;
struct LatentRows {
  KvGeometry latents;  // Of the spans; call.rows.kv is of the heads
  int first_block;
  int num_blocks;
  int max_blocks;   // That there is room for; rows of blocks that there are none of hold anything
  std::byte* rows;  // bf16 [max_blocks * 64, kLatentDims]
};
inline constexpr int kLatentDims = 512;
cudaError_t LaunchTakeLatents(cudaStream_t stream, const TileCall& call, const LatentRows& latents);
// and what the products made of these rows: keys bf16 [max_blocks * 64, heads, 128], values bf16
// [heads, 128, max_blocks * 64].
cudaError_t LaunchPlaceHeads(cudaStream_t stream, const TileCall& call, const LatentRows& latents,
                             const std::byte* keys, const std::byte* values);

}  // namespace writescope::kernels
