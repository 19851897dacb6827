#include "tests/support/attention_scenes.h"

#include <algorithm>

#include "engine/base/check.h"

namespace writescope::testing {

std::vector<Shape> AllShapes() {
  std::vector<Shape> shapes;
  for (const KvDtype dtype : {KvDtype::kF32, KvDtype::kBf16}) {
    const std::string suffix = dtype == KvDtype::kF32 ? "F32" : "Bf16";
    shapes.push_back(
        {"Group2" + suffix, {.num_kv_heads = 2, .k_dim = 32, .v_dim = 32, .dtype = dtype}, 4});
    shapes.push_back(
        {"Group3" + suffix, {.num_kv_heads = 2, .k_dim = 64, .v_dim = 64, .dtype = dtype}, 6});
    shapes.push_back(
        {"Latent" + suffix,
         {.num_kv_heads = 1, .k_dim = 96, .v_dim = 64, .value_in_key = true, .dtype = dtype},
         4});
  }
  return shapes;
}

std::vector<Shape> GroupedShapes() {
  std::vector<Shape> shapes = AllShapes();
  std::erase_if(shapes, [](const Shape& shape) { return shape.geometry.value_in_key; });
  return shapes;
}

std::vector<PlacementCase> AllPlacements() {
  return {
      {"AllSwing", {0, 0, 40, 0}},
      {"FourRegions", {4, 10, 16, 10}},
      {"NoSwing", {2, 20, 0, 20}},
      {"Resident", {40, 0, 0, 0}},
  };
}

AttentionRigOptions RigOptions(const Shape& shape, const PlacementCase& placement) {
  AttentionRigOptions options;
  options.cache.geometry = shape.geometry;
  options.cache.blocks = placement.blocks;
  options.num_heads = shape.num_heads;
  return options;
}

std::vector<int> AddBatch(AttentionRig& rig, int64_t shared_tokens,
                          const std::vector<int64_t>& lengths, uint64_t seed) {
  const std::vector<TokenId> shared = RandomTokens(seed, shared_tokens);
  std::vector<int> slots;
  for (size_t i = 0; i < lengths.size(); ++i) {
    std::vector<TokenId> tokens =
        RandomTokens(Mix(seed, i + 1), std::max<int64_t>(0, lengths[i] - shared_tokens));
    tokens.insert(tokens.begin(), shared.begin(),
                  shared.begin() + std::min(shared_tokens, lengths[i]));
    const int slot = rig.cache().Add(lengths[i] / kBlockTokens + 1);
    CHECK_GE(slot, 0);
    int64_t done = rig.cache().Match(slot, tokens, lengths[i] - 1);
    for (uint64_t at = Mix(seed, 77); done < lengths[i]; at = Mix(at, 5)) {
      const int64_t chunk =
          std::min<int64_t>(lengths[i] - done, 1 + static_cast<int64_t>(at % 200));
      const absl::Status status = rig.cache().Append(
          slot, std::span(tokens).subspan(static_cast<size_t>(done), static_cast<size_t>(chunk)));
      CHECK(status.ok()) << status.ToString();
      done += chunk;
    }
    CHECK(rig.cache().cache().AwaitCommits(slot).ok());
    slots.push_back(slot);
  }
  return slots;
}

double ShareForCut(const attention::RunList& runs, int64_t cut) {
  if (runs.spilled_blocks() == 0) return 0;
  return static_cast<double>(runs.host.num_blocks() + runs.swing.num_blocks() - cut) /
         static_cast<double>(runs.spilled_blocks());
}

}  // namespace writescope::testing
