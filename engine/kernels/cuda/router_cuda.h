// Launches that decide which experts a token goes to, and put the (token, expert) pairs in the
// order in which the experts' products run. No result leaves the GPU. The twin of the choice is
// kernels/router.h.
#pragma once

#include <cuda_runtime_api.h>

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

// out[t] += sum over i of weights[t, i] * results[t, i], in the order of i.
// results [num_tokens, k, hidden] and out [num_tokens, hidden] are of `type`.
cudaError_t LaunchCombine(cudaStream_t stream, ValueType type, int num_tokens, int k, int hidden,
                          const void* results, const float* weights, void* out);

}  // namespace writescope::kernels
