#include "engine/ops/cuda/latent_heads.h"

#include <algorithm>
#include <limits>

#include "engine/base/check.h"
#include "engine/kernels/cuda/attend_launch.h"
#include "engine/kernels/cuda/attend_operands.h"

namespace writescope::ops {
namespace {

using kernels::TileCall;
using kernels::TileKernel;
using kernels::TileSizes;

// Of latents whose keys and values are made at once: what is made of 2,048 tokens for 16 heads is
// still in the second cache when it is put where it belongs.
constexpr int kPartHeadBlocks = 512;

// What heads make of latents, as a cache would have it that kept that.
KvGeometry GeometryOf(const LatentHeads& heads) {
  return {.num_kv_heads = static_cast<int>(heads.key_up.size()),
          .k_dim = heads.key_dim(),
          .v_dim = heads.value_dim()};
}

}  // namespace

bool LatentHeadsAttention::Takes(const KvGeometry& kv, const LatentHeads& heads) const {
  if (max_shared_bytes_ == 0 || !kv.value_in_key || kv.dtype != KvDtype::kBf16) return false;
  if (heads.key_up.empty() || heads.key_up[0].type != WeightType::kBf16) return false;
  if (kv.k_dim != kLatentKeyDim || heads.key_up[0].rows != kernels::kLatentDims) return false;
  if (heads.key_up[0].rows + heads.rope_dim != kv.k_dim) return false;
  const TileKernel kernel = kernels::LatentHeadsKernel(GeometryOf(heads));
  return kernel.launch != nullptr && kernel.shared_bytes <= max_shared_bytes_ &&
         LayoutFor(heads).max_blocks > 0;
}

LatentHeadsAttention::Layout LatentHeadsAttention::LayoutFor(const LatentHeads& heads) const {
  const KvGeometry kv = GeometryOf(heads);
  Layout result;
  result.part_blocks = std::max(1, kPartHeadBlocks / kv.num_kv_heads);
  result.part.num_tokens = result.part_blocks * kBlockTokens;
  std::byte* at = scratch_;
  const auto take = [&](int64_t values) {
    std::byte* const taken = at;
    at += values * 2;
    return taken;
  };
  const int64_t tokens = result.part.num_tokens;
  result.part.latents = take(tokens * heads.key_up[0].rows);
  result.part.keys = take(tokens * kv.num_kv_heads * heads.key_up[0].cols);
  result.part.values = take(tokens * kv.num_kv_heads * kv.v_dim);
  result.operands = at;
  const int64_t left = scratch_bytes_ - (at - scratch_);
  result.max_blocks = left / kernels::LatentHeadsKernel(kv).scratch_block_bytes;
  return result;
}

void LatentHeadsAttention::MakeOperands(const TileCall& call, const KvGeometry& kv,
                                        const Layout& layout, const LatentProducts& products) {
  const LatentPart& part = layout.part;
  for (int first = 0; first == 0 || first < call.sizes.num_blocks; first += layout.part_blocks) {
    const kernels::LatentRows latents = {
        .latents = kv,
        .first_block = first,
        .num_blocks = std::min(layout.part_blocks, call.sizes.num_blocks - first),
        .max_blocks = layout.part_blocks,
        .rows = const_cast<std::byte*>(part.latents)};
    compute_.Check(kernels::LaunchTakeLatents(compute_.stream(), call, latents), "latents");
    products(part);
    compute_.Check(
        kernels::LaunchPlaceHeads(compute_.stream(), call, latents, part.keys, part.values),
        "keys and values of heads");
  }
}

void LatentHeadsAttention::Attend(const AttendArgs& args, kernels::AttendRows rows,
                                  int64_t max_array_bytes, const LatentProducts& products,
                                  Place place) {
  const LatentHeads& heads = *args.state.heads;
  CHECK(Takes(args.kv, heads) && static_cast<int>(heads.key_up.size()) == args.num_heads);
  const Layout layout = LayoutFor(heads);
  rows.kv = GeometryOf(heads);
  const TileKernel kernel = kernels::LatentHeadsKernel(rows.kv);
  Prepare(kernel);
  tiles_.Plan(args, {.min_rows = 1, .max_rows = std::numeric_limits<int>::max()},
              {.tile_rows = kernel.tile_rows,
               .max_array_bytes = max_array_bytes,
               .max_blocks = layout.max_blocks},
              [&](const TileSizes& sizes, std::span<const std::byte> arrays) {
                TileCall call;
                call.rows = rows;
                call.sizes = sizes;
                call.scratch = layout.operands;
                call.arrays = place(arrays, call.inlined);
                MakeOperands(call, args.kv, layout, products);
                compute_.Check(kernel.launch(compute_.stream(), call), "attention of heads");
              });
}

void LatentHeadsAttention::Prepare(const TileKernel& kernel) {
  if (!is_prepared_) compute_.Check(kernel.prepare(), "shared memory of attention");
  is_prepared_ = true;
}

void LatentHeadsAttention::WarmUp(const KvGeometry& kv, const LatentHeads& heads,
                                  const LatentProducts& products) {
  if (!Takes(kv, heads)) return;
  const Layout layout = LayoutFor(heads);
  TileCall call = {};
  call.rows.kv = GeometryOf(heads);
  call.rows.num_heads = call.rows.kv.num_kv_heads;
  call.scratch = layout.operands;
  const TileKernel kernel = kernels::LatentHeadsKernel(call.rows.kv);
  Prepare(kernel);
  MakeOperands(call, kv, layout, products);
  compute_.Check(kernel.launch(compute_.stream(), call), "warm-up of attention");
}

}  // namespace writescope::ops
