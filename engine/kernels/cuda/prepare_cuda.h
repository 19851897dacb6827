// Launches of the step from projections to attention: norm of each head, rotary embedding, scaled
// queries, and the write of keys and values into their tiles. The twin is the CPU's, of
// kernels/elementwise.h and kernels/kv_write.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "engine/base/tile_layout.h"
#include "engine/kernels/cuda/value_type.h"

namespace writescope::kernels {

// Where a token's key and value go, and the token's position.
struct TokenPlace {
  std::byte* block = nullptr;  // In layer 0 of the call
  int64_t position = 0;
  int64_t layer_stride_bytes = 0;
  int32_t slot = 0;  // In [0, 64)
};

struct RopeArgs {
  const float* inv_freq = nullptr;  // [dim / 2]
  int dim = 0;                      // The first half pairs with the second.
  float cos_sin_scale = 1;
};

// Shapes as in ops::GqaPrepareArgs.
struct GqaPrepareCuda {
  ValueType type = ValueType::kBf16;
  int num_tokens = 0;
  int num_heads = 0;
  int head_dim = 0;
  KvGeometry kv;
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t q_stride = 0;   // Values from a token to the next
  int64_t kv_stride = 0;  // Of k, and of v
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
  float norm_eps = 0;
  RopeArgs rope;
  float scale_log2 = 0;
  int layer = 0;                       // Of the places
  const TokenPlace* places = nullptr;  // [num_tokens]; may be mapped.
  float* q_out = nullptr;
};

// Shapes as in ops::MlaPrepareArgs. With `absorb` it leaves the latent part of q_out, which is a
// matrix product.
struct MlaPrepareCuda {
  ValueType type = ValueType::kBf16;
  int num_tokens = 0;
  int num_heads = 0;
  int nope_dim = 0;
  int latent_dim = 0;
  KvGeometry kv;
  const void* q = nullptr;
  const void* kv_a = nullptr;
  int64_t q_stride = 0;
  int64_t kv_a_stride = 0;
  const float* kv_norm = nullptr;
  float norm_eps = 0;
  RopeArgs rope;
  float scale_log2 = 0;
  int layer = 0;
  const TokenPlace* places = nullptr;
  bool absorb = true;
  float* q_out = nullptr;
};

cudaError_t LaunchGqaPrepare(cudaStream_t stream, const GqaPrepareCuda& args);
cudaError_t LaunchMlaPrepare(cudaStream_t stream, const MlaPrepareCuda& args);

}  // namespace writescope::kernels
