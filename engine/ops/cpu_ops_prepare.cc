// Queries, keys and values on the CPU device: norms, rotary embedding, and the write into the
// tiles.
#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/base/check.h"
#include "engine/kernels/elementwise.h"
#include "engine/kernels/kv_write.h"
#include "engine/ops/cpu_ops_impl.h"

namespace writescope::ops {
namespace {

// A rotated, normed and written value takes about 2 ns, sines and cosines of the position included.
constexpr double kPrepareUsPerValue = 0.002;

// The K plane of a KV head in the block of `target`; the V plane follows it.
std::byte* KeyPlane(const KvGeometry& kv, const KvTarget& target, int head) {
  return target.block + head * kv.head_bytes();
}

void CheckTargets(const KvGeometry& kv, int num_tokens, std::span<const int64_t> positions,
                  std::span<const KvTarget> targets) {
  CHECK_EQ(static_cast<int>(positions.size()), num_tokens);
  CHECK_EQ(static_cast<int>(targets.size()), num_tokens);
  CHECK(kv.k_dim % kDimMultiple == 0 && kv.v_dim % kDimMultiple == 0);
  for (const KvTarget& target : targets) {
    CHECK(target.block != nullptr && target.slot >= 0 && target.slot < kBlockTokens)
        << "slot " << target.slot;
  }
}

// A token's cosines and sines, and room for one key.
struct TokenScratch {
  TokenScratch(std::vector<float>& floats, const Rope& rope, int key_dim, int64_t position) {
    const int half = rope.dim / 2;
    const size_t size = static_cast<size_t>(rope.dim) + static_cast<size_t>(key_dim);
    if (floats.size() < size) floats.resize(size);
    cosines = floats.data();
    sines = cosines + half;
    key = sines + half;
    kernels::RopeAngles(position, half, rope.inv_freq, rope.cos_sin_scale, cosines, sines);
  }

  float* cosines;
  float* sines;
  float* key;
};

void PrepareGqaToken(const GqaPrepareArgs& args, int64_t token, const TokenScratch& scratch) {
  const int dim = args.head_dim;
  const int half = args.rope.dim / 2;
  const KvTarget& target = args.targets[token];
  const auto stride = [&](int heads) {
    return args.token_stride > 0 ? args.token_stride : int64_t{heads} * dim;
  };
  for (int h = 0; h < args.num_heads; ++h) {
    const float* q =
        static_cast<const float*>(args.q) + token * stride(args.num_heads) + int64_t{h} * dim;
    float* to = args.q_out + (token * args.num_heads + h) * args.kv.k_dim;
    if (args.q_norm != nullptr) {
      kernels::RmsNormRow(dim, q, args.q_norm, args.norm_eps, to);
    } else {
      std::copy_n(q, dim, to);
    }
    kernels::RopeRow(half, scratch.cosines, scratch.sines, to);
    for (int d = 0; d < dim; ++d) to[d] *= args.scale_log2;
    std::fill(to + dim, to + args.kv.k_dim, 0.0f);
  }
  for (int h = 0; h < args.kv.num_kv_heads; ++h) {
    const int64_t at = token * stride(args.kv.num_kv_heads) + int64_t{h} * dim;
    const float* k = static_cast<const float*>(args.k) + at;
    if (args.k_norm != nullptr) {
      kernels::RmsNormRow(dim, k, args.k_norm, args.norm_eps, scratch.key);
    } else {
      std::copy_n(k, dim, scratch.key);
    }
    kernels::RopeRow(half, scratch.cosines, scratch.sines, scratch.key);
    std::byte* plane = KeyPlane(args.kv, target, h);
    kernels::WriteKey(target.slot, dim, args.kv.k_dim, args.kv.dtype, scratch.key, plane);
    kernels::WriteValue(target.slot, dim, args.kv.v_dim, args.kv.dtype,
                        static_cast<const float*>(args.v) + at, plane + args.kv.k_plane_bytes());
  }
}

int64_t QueryStride(const MlaPrepareArgs& args) {
  return args.token_stride > 0 ? args.token_stride
                               : int64_t{args.num_heads} * (args.nope_dim + args.rope_dim);
}

void PrepareMlaToken(const MlaPrepareArgs& args, int64_t token, const TokenScratch& scratch) {
  const int half = args.rope_dim / 2;
  const int k_dim = args.kv.k_dim;
  const int head_dim = args.nope_dim + args.rope_dim;
  const int key_dim = args.latent_dim + args.rope_dim;
  for (int h = 0; h < args.num_heads; ++h) {
    const float* q =
        static_cast<const float*>(args.q) + token * QueryStride(args) + int64_t{h} * head_dim;
    float* to = args.q_out + (token * args.num_heads + h) * k_dim + args.latent_dim;
    std::copy_n(q + args.nope_dim, args.rope_dim, to);
    kernels::RopeRow(half, scratch.cosines, scratch.sines, to);
    for (int d = 0; d < args.rope_dim; ++d) to[d] *= args.scale_log2;
    std::fill(to + args.rope_dim, to + k_dim - args.latent_dim, 0.0f);
  }
  const float* kv_a = static_cast<const float*>(args.kv_a) +
                      token * (args.token_stride > 0 ? args.token_stride : key_dim);
  kernels::RmsNormRow(args.latent_dim, kv_a, args.kv_norm, args.norm_eps, scratch.key);
  std::copy_n(kv_a + args.latent_dim, args.rope_dim, scratch.key + args.latent_dim);
  kernels::RopeRow(half, scratch.cosines, scratch.sines, scratch.key + args.latent_dim);
  const KvTarget& target = args.targets[token];
  kernels::WriteKey(target.slot, key_dim, k_dim, args.kv.dtype, scratch.key,
                    KeyPlane(args.kv, target, 0));
}

}  // namespace

template <typename Args>
void CpuOps::FillPlaces(const Args& args, std::vector<int64_t>* positions,
                        std::vector<KvTarget>* targets) {
  const bool staged = args.staged_layer >= 0;
  StagedStep& step = staged_[args.staged_step];
  const auto staged_rows = [&](auto rows) {
    return rows.subspan(static_cast<size_t>(args.staged_first_row),
                        static_cast<size_t>(args.num_tokens));
  };
  const std::span<const int64_t> at = staged ? staged_rows(step.positions()) : args.positions;
  const std::span<const KvTarget> to =
      staged ? staged_rows(step.TargetsOf(args.staged_layer)) : args.targets;
  CheckTargets(args.kv, args.num_tokens, at, to);
  positions->assign(at.begin(), at.end());
  targets->assign(to.begin(), to.end());
}

void CpuOps::GqaPrepare(const GqaPrepareArgs& args) {
  std::vector<int64_t> positions;
  std::vector<KvTarget> targets;
  FillPlaces(args, &positions, &targets);
  CHECK_LE(args.num_tokens, limits_.max_tokens);
  CHECK_LE(args.head_dim, std::min({limits_.max_head_dim, args.kv.k_dim, args.kv.v_dim}));
  CHECK(args.rope.dim % 2 == 0 && args.rope.dim <= args.head_dim);
  CHECK(!args.kv.value_in_key);
  CHECK_EQ(args.num_heads % args.kv.num_kv_heads, 0);
  device_.compute().Launch([this, args = args, positions = std::move(positions),
                            targets = std::move(targets)]() mutable {
    args.positions = positions;
    args.targets = targets;
    RunGqaPrepare(args);
  });
}

void CpuOps::MlaPrepare(const MlaPrepareArgs& args) {
  std::vector<int64_t> positions;
  std::vector<KvTarget> targets;
  FillPlaces(args, &positions, &targets);
  CHECK_LE(args.num_tokens, limits_.max_tokens);
  CHECK_LE(args.rope_dim, limits_.max_head_dim);
  CHECK_EQ(args.rope.dim, args.rope_dim);
  CHECK(args.rope_dim % 2 == 0 && args.latent_dim + args.rope_dim <= args.kv.k_dim);
  CHECK(args.kv.value_in_key && args.kv.num_kv_heads == 1);
  CHECK_EQ(static_cast<int>(args.key_up.size()), args.num_heads);
  device_.compute().Launch(
      [this, args = args, key_up = std::vector<Matrix>(args.key_up.begin(), args.key_up.end()),
       positions = std::move(positions), targets = std::move(targets)]() mutable {
        args.positions = positions;
        args.targets = targets;
        args.key_up = key_up;
        RunMlaPrepare(args);
      });
}

void CpuOps::RunGqaPrepare(const GqaPrepareArgs& args) {
  const int64_t heads = args.num_heads + 2 * args.kv.num_kv_heads;
  const double work_us =
      kPrepareUsPerValue * static_cast<double>(args.num_tokens * heads * args.head_dim);
  ForItems(args.num_tokens, work_us, [&](int64_t token, int thread) {
    PrepareGqaToken(
        args, token,
        TokenScratch(scratch_[thread].row, args.rope, args.head_dim, args.positions[token]));
  });
}

void CpuOps::RunMlaPrepare(const MlaPrepareArgs& args) {
  const int key_dim = args.latent_dim + args.rope_dim;
  const double work_us =
      kPrepareUsPerValue *
      static_cast<double>(int64_t{args.num_tokens} * (args.num_heads * args.rope_dim + key_dim));
  ForItems(args.num_tokens, work_us, [&](int64_t token, int thread) {
    PrepareMlaToken(args, token,
                    TokenScratch(scratch_[thread].row, args.rope, key_dim, args.positions[token]));
  });
  // The absorbed key projection: the part without position, seen from the latent.
  std::vector<Product> products;
  for (int h = 0; h < args.num_heads; ++h) {
    const int head_dim = args.nope_dim + args.rope_dim;
    products.push_back({.num_rows = args.num_tokens,
                        .x = static_cast<const float*>(args.q) + int64_t{h} * head_dim,
                        .x_stride = QueryStride(args),
                        .w = args.key_up[h],
                        .y = args.q_out + int64_t{h} * args.kv.k_dim,
                        .y_stride = int64_t{args.num_heads} * args.kv.k_dim,
                        .scale = args.scale_log2});
    CHECK(args.key_up[h].rows == args.latent_dim && args.key_up[h].cols == args.nope_dim);
  }
  RunProducts(products);
}

void CpuOps::MlaOutput(int num_tokens, std::span<const Matrix> value_up, const void* latent,
                       void* out) {
  device_.compute().Launch(
      [=, this, value_up = std::vector<Matrix>(value_up.begin(), value_up.end())] {
        const int64_t num_heads = static_cast<int64_t>(value_up.size());
        std::vector<Product> products;
        for (int64_t h = 0; h < num_heads; ++h) {
          const Matrix& w = value_up[h];
          products.push_back({.num_rows = num_tokens,
                              .x = static_cast<const float*>(latent) + h * w.cols,
                              .x_stride = num_heads * w.cols,
                              .w = w,
                              .y = static_cast<float*>(out) + h * w.rows,
                              .y_stride = num_heads * w.rows});
        }
        RunProducts(products);
      });
}

}  // namespace writescope::ops
