// Queries, keys and values on the GPU.
#include <algorithm>

#include "engine/base/check.h"
#include "engine/ops/cuda/cuda_ops_impl.h"

namespace writescope::ops {

void CudaOps::FillPlaces(std::span<const int64_t> positions, std::span<const KvTarget> targets,
                         kernels::TokenPlace* places) {
  CHECK_EQ(positions.size(), targets.size());
  for (size_t i = 0; i < targets.size(); ++i) {
    const KvTarget& target = targets[i];
    CHECK(target.block != nullptr && target.slot >= 0 && target.slot < kBlockTokens)
        << "slot " << target.slot;
    places[i] = {.block = target.block,
                 .position = positions[i],
                 .layer_stride_bytes = target.layer_stride_bytes,
                 .slot = target.slot};
  }
}

const kernels::TokenPlace* CudaOps::StagePlaces(std::span<const int64_t> positions,
                                                std::span<const KvTarget> targets) {
  auto* places = reinterpret_cast<kernels::TokenPlace*>(device_.compute().StageArguments(
      static_cast<int64_t>(targets.size() * sizeof(kernels::TokenPlace))));
  FillPlaces(positions, targets, places);
  return places;
}

namespace {

// Values from a token to the next.
int64_t StrideOr(int64_t given, int64_t dense) { return given > 0 ? given : dense; }

}  // namespace

void CudaOps::GqaPrepare(const GqaPrepareArgs& args) {
  CHECK_LE(args.num_tokens, limits_.max_tokens);
  CHECK(args.kv.k_dim % kDimMultiple == 0 && args.kv.v_dim % kDimMultiple == 0);
  CHECK_LE(args.head_dim, std::min({limits_.max_head_dim, args.kv.k_dim, args.kv.v_dim}));
  CHECK(args.rope.dim % 2 == 0 && args.rope.dim <= args.head_dim);
  CHECK(!args.kv.value_in_key);
  CHECK_EQ(args.num_heads % args.kv.num_kv_heads, 0);
  Check(
      kernels::LaunchGqaPrepare(
          stream(),
          {.type = type_,
           .num_tokens = args.num_tokens,
           .num_heads = args.num_heads,
           .head_dim = args.head_dim,
           .kv = args.kv,
           .q = args.q,
           .k = args.k,
           .v = args.v,
           .q_stride = StrideOr(args.token_stride, int64_t{args.num_heads} * args.head_dim),
           .kv_stride = StrideOr(args.token_stride, int64_t{args.kv.num_kv_heads} * args.head_dim),
           .q_norm = args.q_norm,
           .k_norm = args.k_norm,
           .norm_eps = args.norm_eps,
           .rope = {args.rope.inv_freq, args.rope.dim, args.rope.cos_sin_scale},
           .scale_log2 = args.scale_log2,
           .layer = std::max(args.staged_layer, 0),
           .places = PlacesOf(args),
           .q_out = args.q_out}),
      "queries, keys and values");
}

void CudaOps::MlaPrepare(const MlaPrepareArgs& args) {
  CHECK_LE(args.num_tokens, limits_.max_tokens);
  CHECK_EQ(args.kv.k_dim % kDimMultiple, 0);
  CHECK_EQ(args.rope.dim, args.rope_dim);
  CHECK(args.rope_dim % 2 == 0 && args.latent_dim + args.rope_dim <= args.kv.k_dim);
  CHECK(args.kv.value_in_key && args.kv.num_kv_heads == 1);
  CHECK_EQ(static_cast<int>(args.key_up.size()), args.num_heads);
  const int64_t head_dim = args.nope_dim + args.rope_dim;
  const int64_t q_stride = StrideOr(args.token_stride, args.num_heads * head_dim);
  Check(kernels::LaunchMlaPrepare(
            stream(), {.type = type_,
                       .num_tokens = args.num_tokens,
                       .num_heads = args.num_heads,
                       .nope_dim = args.nope_dim,
                       .latent_dim = args.latent_dim,
                       .kv = args.kv,
                       .q = args.q,
                       .kv_a = args.kv_a,
                       .q_stride = q_stride,
                       .kv_a_stride = StrideOr(args.token_stride, args.latent_dim + args.rope_dim),
                       .kv_norm = args.kv_norm,
                       .norm_eps = args.norm_eps,
                       .rope = {args.rope.inv_freq, args.rope.dim, args.rope.cos_sin_scale},
                       .scale_log2 = args.scale_log2,
                       .layer = std::max(args.staged_layer, 0),
                       .places = PlacesOf(args),
                       .absorb = args.absorb,
                       .q_out = args.q_out}),
        "queries and latents");
  if (!args.absorb) return;
  // The absorbed key projection: the part without position, seen from the latent.
  for (const Matrix& w : args.key_up) CHECK(w.rows == args.latent_dim && w.cols == args.nope_dim);
  BlasProduct product = ProductOf(args.num_tokens, args.q, q_stride, args.key_up[0], args.q_out,
                                  int64_t{args.num_heads} * args.kv.k_dim);
  product.y_type = kernels::ValueType::kF32;
  product.alpha = args.scale_log2;
  MultiplyHeads(args.key_up, product, head_dim, args.kv.k_dim);
}

void CudaOps::MlaOutput(int num_tokens, std::span<const Matrix> value_up, const void* latent,
                        void* out) {
  const Matrix& w = value_up[0];
  const int64_t num_heads = static_cast<int64_t>(value_up.size());
  MultiplyHeads(value_up,
                ProductOf(num_tokens, latent, num_heads * w.cols, w, out, num_heads * w.rows),
                w.cols, w.rows);
}

}  // namespace writescope::ops
