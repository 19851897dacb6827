// The gated MLP and the mixture of experts against plain loops in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "engine/kernels/elementwise.h"
#include "engine/kernels/quantize_int4.h"
#include "engine/kernels/router.h"
#include "tests/engine/ops/ops_rig.h"
#include "tests/support/seed.h"

namespace writescope::ops {
namespace {

using testing_support::TestSeed;

struct HostMlp {
  HostMlp(int hidden, int width, std::mt19937_64& rng)
      : hidden(hidden),
        width(width),
        gate(Bf16Values(int64_t{width} * hidden, 1 / std::sqrt(static_cast<float>(hidden)), rng)),
        up(Bf16Values(int64_t{width} * hidden, 1 / std::sqrt(static_cast<float>(hidden)), rng)),
        down(Bf16Values(int64_t{width} * hidden, 1 / std::sqrt(static_cast<float>(width)), rng)) {}

  MlpWeights Load(OpsRig& rig, WeightType type, WeightFormat format = WeightFormat::kSource) const {
    return {rig.Load(gate, width, hidden, type, format), rig.Load(up, width, hidden, type, format),
            rig.Load(down, hidden, width, type, format)};
  }
  // Afterwards 4 bits hold the weights exactly: the largest of a group is 8 scales.
  void RoundToInt4() {
    for (auto [w, rows, cols] : {std::tuple(&gate, width, hidden), std::tuple(&up, width, hidden),
                                 std::tuple(&down, hidden, width)}) {
      std::vector<std::byte> packed(kernels::Int4Bytes(rows, cols));
      std::vector<double> values(w->size());
      kernels::QuantizeInt4(rows, cols, w->data(), packed.data());
      kernels::DequantizeInt4(rows, cols, packed.data(), values.data());
      w->assign(values.begin(), values.end());
    }
  }
  std::vector<double> Run(const std::vector<double>& x) const {
    const int64_t rows = static_cast<int64_t>(x.size()) / hidden;
    std::vector<double> g = MatMul(x, gate, rows, width, hidden);
    const std::vector<double> u = MatMul(x, up, rows, width, hidden);
    for (size_t i = 0; i < g.size(); ++i) g[i] = g[i] / (1 + std::exp(-g[i])) * u[i];
    return MatMul(g, down, rows, hidden, width);
  }

  int hidden, width;
  std::vector<float> gate, up, down;
};

TEST(CpuOpsMlp, MatchesTheTwin) {
  std::mt19937_64 rng(TestSeed());
  for (const auto& [rows, hidden, width] :
       {std::tuple<int, int, int>{1, 40, 24}, {5, 300, 290}, {33, 64, 130}, {370, 65, 129}}) {
    for (const WeightType type : {WeightType::kF32, WeightType::kBf16}) {
      const HostMlp mlp(hidden, width, rng);
      const std::vector<float> x = Bf16Values(rows * hidden, 1, rng);
      const std::vector<float> y = Bf16Values(rows * hidden, 1, rng);
      const std::vector<float> got = SameForAnyThreads([&](int num_threads) {
        OpsRig rig(num_threads, {.max_tokens = rows,
                                 .hidden = hidden,
                                 .max_mlp_width = width,
                                 .num_experts = 0,
                                 .experts_per_token = 0,
                                 .num_heads = 1,
                                 .max_head_dim = 32});
        float* out = rig.Upload(y);
        rig.ops().Mlp(rows, rig.Upload(x), mlp.Load(rig, type), out);
        return rig.Download(out, rows * hidden);
      });
      std::vector<double> want = mlp.Run(ToDouble(x));
      for (size_t i = 0; i < want.size(); ++i) want[i] += y[i];
      ExpectNear(got, want, 2e-5);
    }
  }
}

struct MoeCase {
  int num_tokens, hidden, width, num_experts, k;
  bool renormalize;
  float routed_scale;
  int num_groups, topk_groups;
  int shared_width;  // 0 is without.
};

class MoeProblem {
 public:
  MoeProblem(const MoeCase& c, std::mt19937_64& rng)
      : c_(c),
        router_(Bf16Values(int64_t{c.num_experts} * c.hidden,
                           2 / std::sqrt(static_cast<float>(c.hidden)), rng)),
        x_(Bf16Values(int64_t{c.num_tokens} * c.hidden, 1, rng)),
        y_(Bf16Values(int64_t{c.num_tokens} * c.hidden, 1, rng)) {
    for (int e = 0; e < c.num_experts; ++e) experts_.emplace_back(c.hidden, c.width, rng);
    if (c.shared_width > 0) shared_.emplace_back(c.hidden, c.shared_width, rng);
  }

  void RoundExpertsToInt4() {
    for (HostMlp& expert : experts_) expert.RoundToInt4();
  }

  std::vector<float> Run(int num_threads, WeightType type, const ExpertChoice& choice,
                         WeightFormat format = WeightFormat::kSource) const {
    OpsRig rig(num_threads, {.max_tokens = c_.num_tokens,
                             .hidden = c_.hidden,
                             .max_mlp_width = std::max(c_.width, c_.shared_width),
                             .num_experts = c_.num_experts,
                             .experts_per_token = c_.k,
                             .num_heads = 1,
                             .max_head_dim = 32});
    float* out = rig.Upload(y_);
    {
      std::vector<MlpWeights> experts;
      for (const HostMlp& expert : experts_) experts.push_back(expert.Load(rig, type, format));
      MlpWeights shared;
      if (!shared_.empty()) shared = shared_[0].Load(rig, type);
      rig.ops().Moe({.num_tokens = c_.num_tokens,
                     .hidden = c_.hidden,
                     .x = rig.Upload(x_),
                     .out = out,
                     .router = rig.Load(router_, c_.num_experts, c_.hidden, type),
                     .experts = experts,
                     .shared = shared_.empty() ? nullptr : &shared,
                     .experts_per_token = c_.k,
                     .renormalize = c_.renormalize,
                     .routed_scale = c_.routed_scale,
                     .num_groups = c_.num_groups,
                     .topk_groups = c_.topk_groups,
                     .choice = choice});
    }
    return rig.Download(out, int64_t{c_.num_tokens} * c_.hidden);
  }

  // With `chosen` given the experts are not looked for.
  std::vector<double> Want(const std::vector<int32_t>* chosen) const {
    const std::vector<double> logits =
        MatMul(ToDouble(x_), router_, c_.num_tokens, c_.num_experts, c_.hidden);
    std::vector<double> out = ToDouble(y_);
    for (int t = 0; t < c_.num_tokens; ++t) {
      const std::vector<double> x(x_.begin() + t * c_.hidden, x_.begin() + (t + 1) * c_.hidden);
      std::vector<float> token_logits(logits.begin() + t * c_.num_experts,
                                      logits.begin() + (t + 1) * c_.num_experts);
      std::vector<int32_t> experts(c_.k);
      std::vector<double> weights(c_.k);
      kernels::RouteTokenRef({.num_experts = c_.num_experts,
                              .experts_per_token = c_.k,
                              .renormalize = c_.renormalize,
                              .routed_scale = c_.routed_scale,
                              .num_groups = c_.num_groups,
                              .topk_groups = c_.topk_groups},
                             token_logits.data(), experts.data(), weights.data());
      if (chosen != nullptr) {
        experts.assign(chosen->begin() + t * c_.k, chosen->begin() + (t + 1) * c_.k);
        weights = Weights(token_logits, experts);
      }
      for (int i = 0; i < c_.k; ++i) Add(weights[i], experts_[experts[i]].Run(x), t, &out);
      if (!shared_.empty()) Add(1, shared_[0].Run(x), t, &out);
    }
    return out;
  }

 private:
  std::vector<double> Weights(const std::vector<float>& logits,
                              const std::vector<int32_t>& experts) const {
    double all = 0, chosen = 0;
    for (const float logit : logits) all += std::exp(static_cast<double>(logit));
    std::vector<double> weights;
    for (const int32_t expert : experts) {
      weights.push_back(std::exp(static_cast<double>(logits[expert])) / all);
      chosen += weights.back();
    }
    for (double& weight : weights) {
      weight = weight / (c_.renormalize ? chosen : 1) * c_.routed_scale;
    }
    return weights;
  }
  void Add(double weight, const std::vector<double>& y, int token, std::vector<double>* out) const {
    for (int d = 0; d < c_.hidden; ++d) (*out)[token * c_.hidden + d] += weight * y[d];
  }

  MoeCase c_;
  std::vector<float> router_, x_, y_;
  std::vector<HostMlp> experts_, shared_;
};

const MoeCase kCases[] = {
    {1, 64, 40, 8, 2, true, 1, 1, 1, 0},
    {5, 200, 150, 8, 3, false, 2.5f, 1, 1, 100},
    {40, 65, 33, 16, 4, true, 1.5f, 4, 2, 0},
    // More (token, expert) pairs than a wave holds: 300 tokens, 8 of 12 experts each.
    {300, 33, 17, 12, 8, true, 1, 1, 1, 20},
};

TEST(CpuOpsMoe, MatchesTheTwin) {
  std::mt19937_64 rng(TestSeed());
  for (const MoeCase& c : kCases) {
    for (const WeightType type : {WeightType::kF32, WeightType::kBf16}) {
      const MoeProblem problem(c, rng);
      const std::vector<float> got =
          SameForAnyThreads([&](int num_threads) { return problem.Run(num_threads, type, {}); });
      ExpectNear(got, problem.Want(nullptr), 3e-5);
    }
  }
}

TEST(CpuOpsMoe, ExpertsOfFourBitsAreTheValuesTheyStandFor) {
  std::mt19937_64 rng(TestSeed());
  for (const MoeCase& c : kCases) {
    MoeProblem problem(c, rng);
    problem.RoundExpertsToInt4();
    const std::vector<float> got = SameForAnyThreads([&](int num_threads) {
      return problem.Run(num_threads, WeightType::kF32, {}, WeightFormat::kInt4);
    });
    ExpectNear(got, problem.Want(nullptr), 3e-5);
  }
}

TEST(CpuOpsMoe, RecordsAndReplaysTheChoice) {
  std::mt19937_64 rng(TestSeed());
  for (const MoeCase& c : kCases) {
    const MoeProblem problem(c, rng);
    std::vector<int32_t> recorded(c.num_tokens * c.k, -1);
    const std::vector<float> first =
        problem.Run(1, WeightType::kF32, {.record = recorded.data(), .replay = nullptr});
    const std::vector<float> again =
        problem.Run(1, WeightType::kF32, {.record = nullptr, .replay = recorded.data()});
    EXPECT_TRUE(SameBits(first, again));
    // Another choice is obeyed, with this run's own weights.
    std::vector<int32_t> other = recorded;
    for (int32_t& expert : other) expert = (expert + 1) % c.num_experts;
    const std::vector<float> dictated =
        problem.Run(1, WeightType::kF32, {.record = nullptr, .replay = other.data()});
    EXPECT_FALSE(SameBits(first, dictated));
    ExpectNear(dictated, problem.Want(&other), 3e-5);
  }
}

}  // namespace
}  // namespace writescope::ops
