// Attention over one latent for all heads, against the same with expanded keys and values.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "engine/kernels/elementwise.h"
#include "tests/engine/ops/ops_rig.h"
#include "tests/support/seed.h"

namespace writescope::ops {
namespace {

using testing_support::TestSeed;

double Dot(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

struct MlaCase {
  int num_heads, nope, rope, latent, v_head, num_tokens;
};

class MlaProblem {
 public:
  MlaProblem(const MlaCase& c, std::mt19937_64& rng)
      : c_(c),
        q_(Bf16Values(c.num_tokens * c.num_heads * (c.nope + c.rope), 1, rng)),
        kv_a_(Bf16Values(c.num_tokens * (c.latent + c.rope), 1, rng)),
        kv_norm_(Bf16Values(c.latent, 1, rng)),
        inv_freq_(InverseFrequencies(c.rope / 2)) {
    for (int h = 0; h < c.num_heads; ++h) {
      key_up_.push_back(Bf16Values(c.latent * c.nope, 0.3f, rng));
      value_up_.push_back(Bf16Values(c.v_head * c.latent, 0.3f, rng));
    }
  }

  // Outputs [num_tokens, num_heads, v_head] through the operations.
  std::vector<float> Run(int num_threads) const {
    const int rows = c_.num_tokens;
    OpsRig rig(num_threads, {.max_tokens = rows,
                             .hidden = 64,
                             .max_mlp_width = 64,
                             .num_experts = 0,
                             .experts_per_token = 0,
                             .num_heads = c_.num_heads,
                             .max_head_dim = c_.nope + c_.rope});
    const KvGeometry kv{.num_kv_heads = 1,
                        .k_dim = PadDim(c_.latent + c_.rope),
                        .v_dim = PadDim(c_.latent),
                        .value_in_key = true,
                        .dtype = KvDtype::kF32};
    const int num_blocks = static_cast<int>(CeilDiv(rows, kBlockTokens));
    std::byte* blocks = rig.Allocate(num_blocks * kv.block_bytes());
    float* q_out = rig.Floats(rows * c_.num_heads * kv.k_dim);
    Prepare(rig, kv, blocks, q_out);
    const AttendState state = MakeState(rig, rows, c_.num_heads, kv.v_dim);
    rig.ops().ResetAttention(rows, c_.num_heads, kv.v_dim, state);
    const std::vector<AttendSpan> spans = {{blocks, num_blocks, rows, 0, 0, 1}};
    const std::vector<int> readers = {0};
    const std::vector<ReaderRows> reader_rows = {{0, rows, 0}};
    rig.ops().Attend({kv, c_.num_heads, q_out, spans, readers, reader_rows, state});
    float* latent = rig.Floats(rows * c_.num_heads * c_.latent);
    rig.ops().MergeAttention(
        {kv, rows, c_.num_heads, c_.latent, state, nullptr, nullptr, false, latent});
    std::vector<Matrix> value_ups;
    for (const std::vector<float>& w : value_up_) {
      value_ups.push_back(rig.Load(w, c_.v_head, c_.latent, WeightType::kBf16));
    }
    float* out = rig.Floats(rows * c_.num_heads * c_.v_head);
    rig.ops().MlaOutput(rows, value_ups, latent, out);
    return rig.Download(out, rows * c_.num_heads * c_.v_head);
  }

  std::vector<double> Want() const {
    const int key_dim = c_.latent + c_.rope;
    std::vector<std::vector<double>> latents(c_.num_tokens), rotated(c_.num_tokens);
    for (int t = 0; t < c_.num_tokens; ++t) {
      latents[t].resize(c_.latent);
      rotated[t].resize(c_.rope);
      kernels::RmsNormRowRef(c_.latent, &kv_a_[t * key_dim], kv_norm_.data(), 1e-6f,
                             latents[t].data());
      kernels::RopeRowRef(t, c_.rope / 2, inv_freq_.data(), 1.0f, &kv_a_[t * key_dim + c_.latent],
                          rotated[t].data());
    }
    std::vector<double> want;
    for (int t = 0; t < c_.num_tokens; ++t) {
      for (int h = 0; h < c_.num_heads; ++h) {
        const float* q = &q_[(t * c_.num_heads + h) * (c_.nope + c_.rope)];
        std::vector<double> q_rope(c_.rope), scores(t + 1);
        kernels::RopeRowRef(t, c_.rope / 2, inv_freq_.data(), 1.0f, q + c_.nope, q_rope.data());
        std::vector<std::vector<double>> values(t + 1);
        for (int s = 0; s <= t; ++s) {
          scores[s] = Dot(q_rope, rotated[s]);
          for (int n = 0; n < c_.nope; ++n) {
            double key = 0;
            for (int j = 0; j < c_.latent; ++j) key += latents[s][j] * key_up_[h][j * c_.nope + n];
            scores[s] += key * q[n];
          }
          scores[s] *= kScale;
          values[s] = MatMul(latents[s], value_up_[h], 1, c_.v_head, c_.latent);
        }
        const std::vector<double> out = PlainSoftmax(scores, t + 1, values);
        want.insert(want.end(), out.begin(), out.end());
      }
    }
    return want;
  }

 private:
  static constexpr double kScale = 0.2;

  void Prepare(OpsRig& rig, const KvGeometry& kv, std::byte* blocks, float* q_out) const {
    std::vector<int64_t> positions(c_.num_tokens);
    std::vector<KvTarget> targets(c_.num_tokens);
    for (int t = 0; t < c_.num_tokens; ++t) {
      positions[t] = t;
      targets[t] = {blocks + t / kBlockTokens * kv.block_bytes(), t % kBlockTokens};
    }
    std::vector<Matrix> key_ups;
    for (const std::vector<float>& w : key_up_) {
      key_ups.push_back(rig.Load(w, c_.latent, c_.nope, WeightType::kBf16));
    }
    rig.ops().MlaPrepare({.num_tokens = c_.num_tokens,
                          .num_heads = c_.num_heads,
                          .nope_dim = c_.nope,
                          .rope_dim = c_.rope,
                          .latent_dim = c_.latent,
                          .kv = kv,
                          .q = rig.Upload(q_),
                          .kv_a = rig.Upload(kv_a_),
                          .kv_norm = rig.Upload(kv_norm_),
                          .norm_eps = 1e-6f,
                          .rope = {rig.Upload(inv_freq_), c_.rope, 1.0f},
                          .scale_log2 = static_cast<float>(kScale * kLog2E),
                          .key_up = key_ups,
                          .positions = positions,
                          .targets = targets,
                          .q_out = q_out});
  }

  MlaCase c_;
  std::vector<float> q_, kv_a_, kv_norm_, inv_freq_;
  std::vector<std::vector<float>> key_up_, value_up_;
};

TEST(CpuOpsMla, AbsorbedMatchesExpanded) {
  std::mt19937_64 rng(TestSeed());
  for (const MlaCase& c :
       {MlaCase{4, 16, 8, 16, 16, 70}, {16, 32, 16, 72, 24, 40}, {3, 8, 4, 8, 8, 1}}) {
    const MlaProblem problem(c, rng);
    ExpectNear(SameForAnyThreads([&](int num_threads) { return problem.Run(num_threads); }),
               problem.Want(), 2e-5);
  }
}

}  // namespace
}  // namespace writescope::ops
