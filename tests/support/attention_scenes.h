// The shapes and placements that attention is tested over, and batches that share prefixes.
#pragma once

#include <array>
#include <ostream>
#include <string>
#include <vector>

#include "tests/support/attention_rig.h"

namespace writescope::testing {

struct Shape {
  std::string name;
  KvGeometry geometry;
  int num_heads;
};
// For GoogleTest's messages, as below.
inline void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }
// Grouped-query attention with groups of 2 and of 3, and a latent that is key and value; in f32 and
// in bf16. Small: every step of a test takes well under a millisecond.
std::vector<Shape> AllShapes();
// Those whose values have a plane of their own.
std::vector<Shape> GroupedShapes();

// Blocks by region: device, stream, swing, host.
struct PlacementCase {
  std::string name;
  std::array<int64_t, kvcache::kNumRegions> blocks;
};
inline void PrintTo(const PlacementCase& placement, std::ostream* out) { *out << placement.name; }
std::vector<PlacementCase> AllPlacements();

AttentionRigOptions RigOptions(const Shape& shape, const PlacementCase& placement);

// Fills the cache: sequences of the given lengths of which the first `shared_tokens` tokens are
// equal; in chunks of several sizes. The slots.
std::vector<int> AddBatch(AttentionRig& rig, int64_t shared_tokens,
                          const std::vector<int64_t>& lengths, uint64_t seed);

// The share that puts the planned cut behind `cut` swing blocks.
double ShareForCut(const attention::RunList& runs, int64_t cut);

}  // namespace writescope::testing
