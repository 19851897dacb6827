// The gated MLP and the mixture of experts on the GPU against plain loops in double, for each
// kernel and each format of weights. 4-bit weights are held to the values that their quants stand
// for.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string>
#include <tuple>

#include "engine/kernels/quantize_int4.h"
#include "engine/kernels/router.h"
#include "tests/engine/ops/cuda_ops_rig.h"
#include "tests/support/gpu.h"
#include "tests/support/seed.h"

namespace writescope::ops {
namespace {

using testing_support::TestSeed;

// Matrices of one gated MLP, as loaded and as they multiply.
struct HostMlp {
  HostMlp(int hidden, int width, WeightFormat format, std::mt19937_64& rng)
      : hidden(hidden), width(width) {
    const float in = 1 / std::sqrt(static_cast<float>(hidden));
    const float out = 1 / std::sqrt(static_cast<float>(width));
    source = {Bf16Values(int64_t{width} * hidden, 2 * in, rng),
              Bf16Values(int64_t{width} * hidden, in, rng),
              Bf16Values(int64_t{hidden} * width, 2 * out, rng)};
    for (int i = 0; i < 3; ++i) {
      used[i] = ToDouble(source[i]);
      if (format == WeightFormat::kSource) continue;
      const int64_t rows = i < 2 ? width : hidden, cols = i < 2 ? hidden : width;
      std::vector<std::byte> packed(kernels::Int4Bytes(rows, cols));
      kernels::QuantizeInt4(rows, cols, source[i].data(), packed.data());
      kernels::DequantizeInt4(rows, cols, packed.data(), used[i].data());
    }
  }

  int hidden, width;
  std::array<std::vector<float>, 3> source;
  std::array<std::vector<double>, 3> used;
};

// A value and the variance of what roundings do to it.
struct Wanted {
  std::vector<double> value, variance;
};

double Dot(int n, const double* a, const double* b) { return std::inner_product(a, a + n, b, 0.0); }

// y += weight * mlp(x) for one row. bf16 rounds the activation once, and gate and up too where they
// are `stored`; a rounding is off by 2^-8 / sqrt(3) of the value at most, rms.
void AddMlp(const HostMlp& mlp, const double* x, double weight, double round, bool stored,
            double* value, double* variance) {
  std::vector<double> act(mlp.width), act_variance(mlp.width);
  for (int j = 0; j < mlp.width; ++j) {
    const double g = Dot(mlp.hidden, &mlp.used[0][int64_t{j} * mlp.hidden], x);
    const double u = Dot(mlp.hidden, &mlp.used[1][int64_t{j} * mlp.hidden], x);
    act[j] = g / (1 + std::exp(-g)) * u;
    const double slope = 1 + std::abs(g);  // Of log silu(g) to log g, at most
    act_variance[j] = act[j] * act[j] * (1 + (stored ? 1 + slope * slope : 0)) * round * round / 3;
  }
  for (int d = 0; d < mlp.hidden; ++d) {
    const double* down = &mlp.used[2][int64_t{d} * mlp.width];
    const double y = Dot(mlp.width, down, act.data());
    double sum = y * y * round * round / 3;
    for (int j = 0; j < mlp.width; ++j) sum += down[j] * down[j] * act_variance[j];
    value[d] += weight * y;
    variance[d] += weight * weight * sum;
  }
}

// The number of values beyond six standard deviations, the last rounding and float32's own error.
int CountWrong(const std::vector<float>& got, const Wanted& want, double round) {
  int wrong = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double bound = 6 * std::sqrt(want.variance[i]) + round * std::abs(want.value[i]) + 2e-5;
    wrong += !(std::abs(got[i] - want.value[i]) <= bound);
  }
  return wrong;
}

struct MoeCase {
  int tokens, hidden, width, num_experts, k;
  bool renormalize = true;
  float routed_scale = 1;
  int num_groups = 1, topk_groups = 1;
  int shared_width = 0;
  bool all_on_one = false;  // Replayed: every token's first expert is the last one.
};

// Odd sizes and those of the goldens; few slots to an expert, some, and many, so that each kernel
// runs; experts that nobody chooses; more tokens than one wave takes.
const MoeCase kCases[] = {
    {.tokens = 1, .hidden = 64, .width = 40, .num_experts = 8, .k = 2},
    {.tokens = 7, .hidden = 32, .width = 16, .num_experts = 4, .k = 2, .shared_width = 48},
    {.tokens = 5,
     .hidden = 200,
     .width = 150,
     .num_experts = 64,
     .k = 6,
     .renormalize = false,
     .routed_scale = 2.5f,
     .shared_width = 100},
    {.tokens = 40,
     .hidden = 65,
     .width = 33,
     .num_experts = 16,
     .k = 4,
     .routed_scale = 1.5f,
     .num_groups = 4,
     .topk_groups = 2},
    {.tokens = 33, .hidden = 256, .width = 384, .num_experts = 6, .k = 2},
    {.tokens = 300, .hidden = 136, .width = 72, .num_experts = 12, .k = 8, .shared_width = 20},
    {.tokens = 300, .hidden = 136, .width = 72, .num_experts = 12, .k = 1},
    {.tokens = 200, .hidden = 63, .width = 77, .num_experts = 3, .k = 1},
    {.tokens = 130, .hidden = 512, .width = 264, .num_experts = 128, .k = 8, .all_on_one = true},
    {.tokens = 2100, .hidden = 32, .width = 16, .num_experts = 4, .k = 2},
    // Whole groups of columns: the ring's shapes, by few slots and more, few groups and many, and
    // few units, each for both products; and the wide kernel's, with tiles of all sizes.
    {.tokens = 5, .hidden = 1024, .width = 128, .num_experts = 16, .k = 4},
    {.tokens = 3, .hidden = 128, .width = 1408, .num_experts = 4, .k = 2},
    {.tokens = 24, .hidden = 1024, .width = 256, .num_experts = 8, .k = 4},
    {.tokens = 20, .hidden = 128, .width = 1024, .num_experts = 4, .k = 2},
    {.tokens = 2, .hidden = 2176, .width = 128, .num_experts = 4, .k = 2},
    {.tokens = 3, .hidden = 128, .width = 2176, .num_experts = 4, .k = 2},
    {.tokens = 100, .hidden = 256, .width = 128, .num_experts = 6, .k = 2},
    {.tokens = 150, .hidden = 256, .width = 128, .num_experts = 16, .k = 4, .all_on_one = true},
    // More steps of columns than the tiled and the wide kernel have stages.
    {.tokens = 100, .hidden = 680, .width = 40, .num_experts = 6, .k = 2},
    {.tokens = 100, .hidden = 768, .width = 128, .num_experts = 6, .k = 2},
};

class MoeProblem {
 public:
  MoeProblem(const MoeCase& c, WeightFormat format, std::mt19937_64& rng)
      : c_(c),
        format_(format),
        router_(Bf16Values(int64_t{c.num_experts} * c.hidden,
                           2 / std::sqrt(static_cast<float>(c.hidden)), rng)),
        x_(Bf16Values(int64_t{c.tokens} * c.hidden, 1, rng)),
        y_(Bf16Values(int64_t{c.tokens} * c.hidden, 1, rng)) {
    for (int e = 0; e < c.num_experts; ++e) experts_.emplace_back(c.hidden, c.width, format, rng);
    if (c.shared_width > 0) {
      shared_.emplace_back(c.hidden, c.shared_width, WeightFormat::kSource, rng);
    }
    if (c.all_on_one) {
      for (int t = 0; t < c.tokens; ++t) {
        for (int i = 0; i < c.k; ++i)
          replay_.push_back((c.num_experts - 1 + i * (t % 5 + 1)) % c.num_experts);
      }
    }
  }

  OpsLimits limits() const {
    return {.max_tokens = c_.tokens,
            .hidden = c_.hidden,
            .max_mlp_width = std::max(c_.width, c_.shared_width),
            .max_expert_width = c_.width,
            .num_experts = c_.num_experts,
            .experts_per_token = c_.k,
            .num_heads = 1,
            .max_head_dim = 32};
  }

  // Fills `record`, [tokens, k].
  std::vector<float> Run(const CudaOpsOptions& options, std::vector<int32_t>* record) const {
    CudaRig rig(limits(), options);
    const auto bytes = [&](int64_t rows, int64_t cols, WeightFormat format) {
      return rig.ops().footprint().matrix_bytes(WeightType::kBf16, format, rows, cols);
    };
    const auto place = [&](const HostMlp& mlp, WeightFormat format, std::byte* to) {
      const int64_t in = bytes(mlp.width, mlp.hidden, format);
      return MlpWeights{
          rig.LoadTo(to, mlp.source[0], mlp.width, mlp.hidden, WeightType::kBf16, format),
          rig.LoadTo(to + in, mlp.source[1], mlp.width, mlp.hidden, WeightType::kBf16, format),
          rig.LoadTo(to + 2 * in, mlp.source[2], mlp.hidden, mlp.width, WeightType::kBf16, format)};
    };
    const int64_t expert_bytes =
        2 * bytes(c_.width, c_.hidden, format_) + bytes(c_.hidden, c_.width, format_);
    std::byte* memory = rig.Allocate(c_.num_experts * expert_bytes);
    std::vector<MlpWeights> experts;
    for (int e = 0; e < c_.num_experts; ++e) {
      experts.push_back(place(experts_[e], format_, memory + e * expert_bytes));
    }
    MlpWeights shared;
    if (!shared_.empty()) {
      shared =
          place(shared_[0], WeightFormat::kSource,
                rig.Allocate(3 * bytes(c_.shared_width, c_.hidden + 8, WeightFormat::kSource) +
                             3 * bytes(c_.hidden, c_.shared_width + 8, WeightFormat::kSource)));
    }
    record->assign(int64_t{c_.tokens} * c_.k, -1);
    void* out = rig.Upload(y_);
    rig.ops().Moe({.num_tokens = c_.tokens,
                   .hidden = c_.hidden,
                   .x = rig.Upload(x_),
                   .out = out,
                   .router = rig.Load(router_, c_.num_experts, c_.hidden, WeightType::kBf16),
                   .experts = experts,
                   .shared = shared_.empty() ? nullptr : &shared,
                   .experts_per_token = c_.k,
                   .renormalize = c_.renormalize,
                   .routed_scale = c_.routed_scale,
                   .num_groups = c_.num_groups,
                   .topk_groups = c_.topk_groups,
                   .choice = {.record = record->data(),
                              .replay = replay_.empty() ? nullptr : replay_.data()}});
    return rig.Download(out, int64_t{c_.tokens} * c_.hidden);
  }

  // Experts from the twin of the router, or those of the replay; `chosen` gets them.
  Wanted Want(bool is_bf16, std::vector<int32_t>* chosen) const {
    const double round = is_bf16 ? kBf16Round : 0;
    const std::vector<double> x = ToDouble(x_);
    const std::vector<double> logits = MatMul(x, router_, c_.tokens, c_.num_experts, c_.hidden);
    Wanted want = {ToDouble(y_), std::vector<double>(y_.size())};
    for (int t = 0; t < c_.tokens; ++t) {
      const std::vector<float> mine(logits.begin() + int64_t{t} * c_.num_experts,
                                    logits.begin() + int64_t{t + 1} * c_.num_experts);
      std::vector<int32_t> experts(c_.k);
      std::vector<double> weights(c_.k);
      kernels::RouteTokenRef({.num_experts = c_.num_experts,
                              .experts_per_token = c_.k,
                              .renormalize = c_.renormalize,
                              .routed_scale = c_.routed_scale,
                              .num_groups = c_.num_groups,
                              .topk_groups = c_.topk_groups},
                             mine.data(), experts.data(), weights.data());
      if (!replay_.empty()) {
        experts.assign(&replay_[t * c_.k], &replay_[t * c_.k] + c_.k);
        weights = WeightsOf(mine, experts);
      }
      chosen->insert(chosen->end(), experts.begin(), experts.end());
      double* value = &want.value[int64_t{t} * c_.hidden];
      double* variance = &want.variance[int64_t{t} * c_.hidden];
      const double* row = &x[int64_t{t} * c_.hidden];
      for (int i = 0; i < c_.k; ++i) {
        AddMlp(experts_[experts[i]], row, weights[i], round, false, value, variance);
      }
      if (shared_.empty()) continue;
      // Rounded before the shared expert is added.
      for (int d = 0; d < c_.hidden; ++d) variance[d] += value[d] * value[d] * round * round / 3;
      AddMlp(shared_[0], row, 1, round, true, value, variance);
    }
    return want;
  }

  std::vector<HostMlp>& experts() { return experts_; }

 private:
  std::vector<double> WeightsOf(const std::vector<float>& logits,
                                const std::vector<int32_t>& experts) const {
    double all = 0, sum = 0;
    for (const float logit : logits) all += std::exp(static_cast<double>(logit));
    std::vector<double> weights;
    for (const int32_t e : experts) {
      weights.push_back(std::exp(static_cast<double>(logits[e])) / all);
      sum += weights.back();
    }
    for (double& weight : weights) weight = weight / (c_.renormalize ? sum : 1) * c_.routed_scale;
    return weights;
  }

  const MoeCase c_;
  const WeightFormat format_;
  const std::vector<float> router_, x_, y_;
  std::vector<HostMlp> experts_, shared_;
  std::vector<int32_t> replay_;
};

// Which kernels: tensor cores, or none.
using Variant = std::tuple<ComputeType, WeightFormat, bool>;

class CudaMoeTest : public ::testing::TestWithParam<Variant> {
 protected:
  void SetUp() override { SKIP_WITHOUT_GPU(); }
  CudaOpsOptions options() const {
    return {.compute = std::get<0>(GetParam()), .force_simt = std::get<2>(GetParam())};
  }
  bool is_bf16() const { return options().compute == ComputeType::kBf16; }
  // Each of the variant's kernels once; whole groups of columns are 4-bit weights' alone.
  bool IsSmall(const MoeCase& c) const {
    if (!is_bf16() || options().force_simt) return c.tokens < 10 && c.hidden <= 64;
    const bool whole_groups = c.hidden % 128 == 0;
    return c.tokens * c.k <= 600 && c.num_experts <= 16 &&
           !(whole_groups && std::get<1>(GetParam()) == WeightFormat::kSource);
  }
  double round() const { return is_bf16() ? kBf16Round : 0; }
};

TEST_P(CudaMoeTest, MatchesTheTwin) {
  std::mt19937_64 rng(TestSeed());
  for (const MoeCase& c : kCases) {
    if (testing::LeftOut(IsSmall(c))) continue;
    SCOPED_TRACE(c.tokens);
    MoeProblem problem(c, std::get<1>(GetParam()), rng);
    std::vector<int32_t> recorded, chosen;
    const std::vector<float> got = problem.Run(options(), &recorded);
    const Wanted want = problem.Want(is_bf16(), &chosen);
    EXPECT_EQ(recorded, chosen);
    EXPECT_EQ(CountWrong(got, want, round()), 0);
    if (testing::SmallSizes()) continue;
    EXPECT_TRUE(SameBits(got, problem.Run(options(), &recorded)));
  }
}

// The bounds are narrow enough: what the kernels could get wrong does not pass.
TEST_P(CudaMoeTest, PlantedBugsAreSeen) {
  std::mt19937_64 rng(TestSeed());
  for (const int tokens : {33, 45}) {  // For the ring, and for the wide kernel
    SCOPED_TRACE(tokens);
    const MoeCase c = {.tokens = tokens, .hidden = 256, .width = 384, .num_experts = 6, .k = 2};
    MoeProblem problem(c, std::get<1>(GetParam()), rng);
    std::vector<int32_t> recorded, chosen;
    const std::vector<float> got = problem.Run(options(), &recorded);
    const int expert = recorded[0];
    for (int matrix = 0; matrix < 3; ++matrix) {
      const int64_t cols = matrix < 2 ? c.hidden : c.width;
      std::vector<double>& used = problem.experts()[expert].used[matrix];
      const std::vector<double> right = used;
      // Two neighbouring values of every row change places.
      for (size_t at = 0; at < used.size(); at += cols) std::swap(used[at + 2], used[at + 3]);
      EXPECT_GT(CountWrong(got, problem.Want(is_bf16(), &chosen), round()), 0) << matrix;
      // One group of each row has a scale that is off by an eighth.
      used = right;
      for (size_t at = 0; at < used.size(); at += cols) {
        for (int col = 128; col < 256; ++col) used[at + col] *= 1.125;
      }
      EXPECT_GT(CountWrong(got, problem.Want(is_bf16(), &chosen), round()), 0) << matrix;
      used = right;
    }
    EXPECT_EQ(CountWrong(got, problem.Want(is_bf16(), &chosen), round()), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kernels, CudaMoeTest,
    ::testing::Values(Variant{ComputeType::kF32, WeightFormat::kSource, false},
                      Variant{ComputeType::kF32, WeightFormat::kInt4, false},
                      Variant{ComputeType::kBf16, WeightFormat::kSource, true},
                      Variant{ComputeType::kBf16, WeightFormat::kInt4, true},
                      Variant{ComputeType::kBf16, WeightFormat::kSource, false},
                      Variant{ComputeType::kBf16, WeightFormat::kInt4, false}),
    [](const auto& info) {
      return std::string(std::get<0>(info.param) == ComputeType::kF32 ? "f32" : "bf16") +
             (std::get<1>(info.param) == WeightFormat::kInt4 ? "Int4" : "Source") +
             (std::get<2>(info.param) ? "Simt" : "");
    });

TEST(CudaQuantize, GivesTheBitsOfTheTwin) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 rng(TestSeed());
  CudaRig rig({.max_tokens = 1, .hidden = 8, .num_heads = 1, .max_head_dim = 8}, {});
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 1},
                                   {16, 128},
                                   {17, 129},
                                   {48, 32},
                                   {770, 1000},
                                   // Longer than the scratch memory that rows are brought through.
                                   {10'000, 4104}}) {
    if (testing::LeftOut(rows < 100)) continue;
    for (const WeightType type : {WeightType::kF32, WeightType::kBf16}) {
      std::vector<float> w = Bf16Values(rows * cols, 0.03f, rng);
      std::fill_n(w.begin(), std::min<int64_t>(cols, 128), 0.0f);
      const Matrix matrix = rig.Load(w, rows, cols, type, WeightFormat::kInt4);
      EXPECT_EQ(matrix.type, WeightType::kInt4);
      const int64_t size_bytes = kernels::Int4Bytes(rows, cols);
      std::vector<std::byte> want(size_bytes);
      kernels::QuantizeInt4(rows, cols, w.data(), want.data());
      EXPECT_TRUE(rig.Bytes(matrix.data, size_bytes) == want) << rows << " by " << cols;
    }
  }
}

// The dense MLP; in bf16 cuBLAS stores gate and up.
TEST(CudaMlp, MatchesTheTwin) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 rng(TestSeed());
  for (const ComputeType compute : {ComputeType::kF32, ComputeType::kBf16}) {
    for (const auto& [rows, hidden, width] :
         {std::tuple<int, int, int>{1, 40, 24}, {5, 300, 290}, {33, 64, 130}, {2100, 32, 16}}) {
      if (testing::LeftOut(rows < 100)) continue;
      const double round = compute == ComputeType::kBf16 ? kBf16Round : 0;
      const HostMlp mlp(hidden, width, WeightFormat::kSource, rng);
      const std::vector<float> x = Bf16Values(int64_t{rows} * hidden, 1, rng);
      const std::vector<float> y = Bf16Values(int64_t{rows} * hidden, 1, rng);
      Wanted want = {ToDouble(y), std::vector<double>(y.size())};
      const std::vector<double> x_double = ToDouble(x);
      for (int64_t r = 0; r < rows; ++r) {
        AddMlp(mlp, &x_double[r * hidden], 1, round, true, &want.value[r * hidden],
               &want.variance[r * hidden]);
      }
      CudaRig rig({.max_tokens = rows,
                   .hidden = hidden,
                   .max_mlp_width = width,
                   .num_heads = 1,
                   .max_head_dim = 8},
                  {.compute = compute});
      void* out = rig.Upload(y);
      const MlpWeights weights = {rig.Load(mlp.source[0], width, hidden, WeightType::kBf16),
                                  rig.Load(mlp.source[1], width, hidden, WeightType::kBf16),
                                  rig.Load(mlp.source[2], hidden, width, WeightType::kBf16)};
      rig.ops().Mlp(rows, rig.Upload(x), weights, out);
      EXPECT_EQ(CountWrong(rig.Download(out, int64_t{rows} * hidden), want, round), 0);
    }
  }
}

}  // namespace
}  // namespace writescope::ops
