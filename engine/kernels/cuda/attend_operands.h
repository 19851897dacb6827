// The scratch in which the warpgroup kernel finds keys and values as operands, block by block in
// the order of the call's spans: for each head of a block the keys, then the values, as
// attend_warpgroup_maps.h lays them out; behind all of them, where each block's tokens are.
#pragma once

#include <cuda_runtime_api.h>

#include "engine/kernels/cuda/attend_warpgroup_maps.h"
#include "engine/kernels/cuda/attend_work.h"

namespace writescope::kernels {

// The heads that it is for.
inline constexpr int kOperandDims = 128;
inline constexpr int kOperandKeyBytes = kOperandDims / kOperandRowValues * kKeySlabBytes;
inline constexpr int kOperandValueBytes = kOperandDims * kOperandRowBytes;
inline constexpr int kOperandHeadBytes = kOperandKeyBytes + kOperandValueBytes;

struct BlockPlace {
  int32_t first_position;
  int32_t num_tokens;
};

WRITESCOPE_HOST_DEVICE constexpr int64_t OperandBlockBytes(const KvGeometry& kv) {
  return int64_t{kv.num_kv_heads} * kOperandHeadBytes + int64_t{sizeof(BlockPlace)};
}

struct Operands {
  std::byte* heads;  // [num_blocks][num_kv_heads][kOperandHeadBytes]
  BlockPlace* places;
};
WRITESCOPE_HOST_DEVICE inline Operands FindOperands(const TileCall& call) {
  const int64_t bytes =
      int64_t{call.sizes.num_blocks} * call.rows.kv.num_kv_heads * kOperandHeadBytes;
  return {call.scratch, reinterpret_cast<BlockPlace*>(call.scratch + bytes)};
}

// Fills the scratch of a call.
cudaError_t LaunchMakeOperands(cudaStream_t stream, const TileCall& call);

}  // namespace writescope::kernels
