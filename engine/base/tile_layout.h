// The tile format of the KV cache: where each value of K and V lies, for every processor.
//
// A *tile* is 16 tokens of one KV head. A *word* is 32 bits: two bf16 values or one float32.
//   K tile: [k_dim / W][16 tokens][W]   W values of neighbouring dims of one token share a word
//   V tile: [16 / W token groups][v_dim][W]   W neighbouring tokens of one dim share a word
// With W = 2 this is, as it lies, the operand of vdpbf16ps, the B tile of AMX, and the A and B
// fragments of mma.m16n8k16: no side transposes or repacks.
//
// A *block* is 64 tokens of one layer. Per KV head it holds the K plane (4 K tiles), then the V
// plane (4 V tiles, so that token groups go on evenly over tile borders):
//   block: [num_kv_heads] x { K plane, V plane }
// Where the value is a prefix of the key (the latent of MLA) there is no V plane.
// Dims are zero-padded to a multiple of 32; token slots past the end of a sequence are zero.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define WRITESCOPE_HOST_DEVICE __host__ __device__
#else
#define WRITESCOPE_HOST_DEVICE
#endif

namespace writescope {

inline constexpr int kTileTokens = 16;
inline constexpr int kBlockTokens = 64;
inline constexpr int kTilesPerBlock = kBlockTokens / kTileTokens;
inline constexpr int kDimMultiple = 32;

enum class KvDtype { kBf16, kF32 };

WRITESCOPE_HOST_DEVICE constexpr int KvDtypeBytes(KvDtype dtype) {
  return dtype == KvDtype::kBf16 ? 2 : 4;
}
// Values in a 32-bit word.
WRITESCOPE_HOST_DEVICE constexpr int KvWordValues(KvDtype dtype) {
  return dtype == KvDtype::kBf16 ? 2 : 1;
}
WRITESCOPE_HOST_DEVICE constexpr int PadDim(int dim) {
  return (dim + kDimMultiple - 1) / kDimMultiple * kDimMultiple;
}

// Index, in values, inside the K plane of one head of one block. token in [0, 64), dim in [0,
// k_dim).
WRITESCOPE_HOST_DEVICE constexpr int64_t KIndex(int token, int dim, int k_dim, int word_values) {
  const int64_t tile = token / kTileTokens;
  const int64_t in_tile = token % kTileTokens;
  return tile * kTileTokens * k_dim + ((dim / word_values) * kTileTokens + in_tile) * word_values +
         dim % word_values;
}

// Index, in values, inside the V plane of one head of one block. token in [0, 64), dim in [0,
// v_dim).
WRITESCOPE_HOST_DEVICE constexpr int64_t VIndex(int token, int dim, int v_dim, int word_values) {
  return (static_cast<int64_t>(token / word_values) * v_dim + dim) * word_values +
         token % word_values;
}

// The KV of one layer. k_dim and v_dim are padded (PadDim).
struct KvGeometry {
  int num_kv_heads = 0;
  int k_dim = 0;
  int v_dim = 0;              // With value_in_key: the first v_dim dims of the key are the value.
  bool value_in_key = false;  // MLA: one latent serves as key and value.
  KvDtype dtype = KvDtype::kBf16;

  WRITESCOPE_HOST_DEVICE constexpr int64_t k_plane_bytes() const {
    return static_cast<int64_t>(kBlockTokens) * k_dim * KvDtypeBytes(dtype);
  }
  WRITESCOPE_HOST_DEVICE constexpr int64_t v_plane_bytes() const {
    return value_in_key ? 0 : static_cast<int64_t>(kBlockTokens) * v_dim * KvDtypeBytes(dtype);
  }
  // From one head of a block to the next.
  WRITESCOPE_HOST_DEVICE constexpr int64_t head_bytes() const {
    return k_plane_bytes() + v_plane_bytes();
  }
  WRITESCOPE_HOST_DEVICE constexpr int64_t block_bytes() const {
    return num_kv_heads * head_bytes();
  }
  constexpr bool operator==(const KvGeometry&) const = default;
};

}  // namespace writescope
