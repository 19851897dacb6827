// Launches that decide which experts a token goes to, and put the (token, expert) pairs in the
// order in which the experts' products run. No result leaves the GPU. The twin of the choice is
// kernels/router.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "engine/kernels/cuda/value_type.h"
#include "engine/kernels/router.h"

namespace writescope::kernels {

inline constexpr int kMaxExpertsCuda = 384;
inline constexpr int kMaxExpertGroupsCuda = 32;
inline constexpr int kMaxExpertsPerTokenCuda = 32;

// Pair p is the choice p % k of token p / k; a *slot* is its place once sorted by expert.
//
// Neighbouring slots of one expert that are multiplied together; num_slots is 0 past the last tile.
struct ExpertTile {
  int32_t expert = 0;
  int32_t first_slot = 0;
  int32_t num_slots = 0;
  int32_t unused = 0;
};

// Tiles of at most `tile_slots` that any choice of experts can need.
constexpr int64_t MaxExpertTiles(int64_t num_pairs, int num_experts, int tile_slots) {
  const int64_t tiles = num_experts + num_pairs / tile_slots;
  return tiles < num_pairs ? tiles : num_pairs;
}

// logits [num_tokens, num_experts] to experts and weights [num_tokens, experts_per_token]. With
// `replay` the experts are given, and only weighed.
cudaError_t LaunchRoute(cudaStream_t stream, const RouterConfig& config, int num_tokens,
                        const float* logits, bool replay, int32_t* experts, float* weights);

// Sorts pairs by expert, those of an expert by pair. slot_pairs [num_pairs]: the pair at each slot.
// tiles [MaxExpertTiles(...)].
cudaError_t LaunchSortPairs(cudaStream_t stream, int num_experts, int num_pairs, int tile_slots,
                            const int32_t* experts, int32_t* slot_pairs, ExpertTile* tiles);

// Norm, product, LaunchRoute and LaunchSortPairs in one, for few tokens in bf16; sm_80 and later.
struct RouteFewArgs {
  RouterConfig config;
  int num_tokens = 0;  // At most kRouteFewTokens, with at most kRouteFewPairs pairs
  int hidden = 0;
  const void* x = nullptr;      // [num_tokens, hidden]
  const float* norm = nullptr;  // [hidden]: the router sees the norm of x; null: x itself
  float norm_eps = 0;
  void* normed = nullptr;             // [num_tokens, hidden], where a norm is given; not x
  const std::byte* router = nullptr;  // bf16 [num_experts, router_stride]
  int64_t router_stride = 0;
  int tile_slots = 0;
  int num_tiles = 0;
  float* logits = nullptr;       // Scratch [num_tokens, num_experts]
  uint32_t* arrivals = nullptr;  // Zero between calls
  int32_t* experts = nullptr;
  float* weights = nullptr;
  int32_t* slot_pairs = nullptr;
  ExpertTile* tiles = nullptr;
};
inline constexpr int kRouteFewTokens = 16;
inline constexpr int kRouteFewPairs = 512;
// Whether it can: sizes, alignment, and shared memory for the rows.
bool RoutesFew(const RouteFewArgs& args);
cudaError_t LaunchRouteFew(cudaStream_t stream, const RouteFewArgs& args);

// out[t] += sum over i of weights[t, i] * results[t, i], in the order of i; and, with `norm` given,
// normed[t] = LaunchRmsNorm of that, to the same bits.
struct CombineCuda {
  ValueType type = ValueType::kBf16;  // Of results, out and normed
  int num_tokens = 0;
  int k = 0;
  int hidden = 0;
  const void* results = nullptr;   // [num_tokens, k, hidden]
  const float* weights = nullptr;  // [num_tokens, k]
  void* out = nullptr;             // [num_tokens, hidden]
  const float* norm = nullptr;     // [hidden], or null
  float norm_eps = 0;
  void* normed = nullptr;  // [num_tokens, hidden]
};
cudaError_t LaunchCombine(cudaStream_t stream, const CombineCuda& args);

}  // namespace writescope::kernels
