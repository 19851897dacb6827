// What is done in one launch, against the same in several: the experts' router and sum with the
// norms beside them, matrices that lie behind each other, and the projections of MLA in rows of one
// product.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "engine/kernels/cuda/router_cuda.h"
#include "tests/engine/ops/cuda_ops_rig.h"
#include "tests/support/gpu.h"
#include "tests/support/seed.h"

namespace writescope::ops {
namespace {

using testing_support::TestSeed;

class CudaFusedTest : public ::testing::TestWithParam<ComputeType> {
 protected:
  void SetUp() override { SKIP_WITHOUT_GPU(); }
  std::mt19937_64 rng_{TestSeed()};
};

struct MoeCase {
  int tokens, hidden, num_experts;
  bool equal_tokens = false;  // All go to the same experts.
};
// One, two and more chunks of a row, rows that are no whole vectors, and one too long; routed by
// one launch and not; several tiles of an expert; more experts than a lane has four of.
constexpr MoeCase kMoeCases[] = {
    {1, 64, 4},    {13, 65, 4},        {19, 65, 4},   {1, 2048, 8},  {16, 2048, 4},
    {19, 2056, 4}, {7, 4096, 8},       {16, 4096, 4}, {1, 6000, 4},  {1, 8200, 4},
    {5, 64, 60},   {16, 64, 64, true}, {5, 136, 200}, {9, 136, 200}, {16, 136, 200, true}};

TEST_P(CudaFusedTest, NormsAndRouterOfTheExpertsAreThoseOfCallsOfTheirOwn) {
  for (const MoeCase& c : kMoeCases) {
    // Many experts are many launches that load them, and in float32 much work for the plain kernel.
    const bool with_many = c.equal_tokens || (c.num_experts == 200 && c.tokens < 9);
    const bool is_small = c.num_experts == 4 || (with_many && GetParam() == ComputeType::kBf16);
    if (testing::LeftOut(c.hidden < 200 && is_small)) continue;
    constexpr int kWidth = 16, kChosen = 2;
    const OpsLimits limits = {.max_tokens = 32,
                              .hidden = c.hidden,
                              .max_mlp_width = 32,
                              .max_expert_width = kWidth,
                              .num_experts = c.num_experts,
                              .experts_per_token = kChosen,
                              .num_heads = 2,
                              .max_head_dim = 32};
    const auto run = [&](auto& rig, bool fused) {
      std::mt19937_64 rng(7);
      const auto matrix = [&](int64_t rows, int64_t cols) {
        const float sigma = 1 / std::sqrt(static_cast<float>(cols));
        return Bf16Values(rows * cols, sigma, rng);
      };
      const auto bytes = [&](int64_t rows, int64_t cols) {
        return rig.ops().footprint().matrix_bytes(WeightType::kBf16, WeightFormat::kSource, rows,
                                                  cols);
      };
      const int64_t in_bytes = bytes(kWidth, c.hidden), out_bytes = bytes(c.hidden, kWidth);
      std::byte* memory = rig.Allocate(c.num_experts * (2 * in_bytes + out_bytes));
      const auto load = [&](std::byte* to, int64_t rows, int64_t cols) {
        std::vector<uint16_t> halves;
        for (const float value : matrix(rows, cols)) halves.push_back(FloatToBf16(value));
        return *rig.ops().LoadMatrix(to, WeightType::kBf16, WeightFormat::kSource, rows, cols,
                                     reinterpret_cast<const std::byte*>(halves.data()));
      };
      std::vector<MlpWeights> experts;
      for (int e = 0; e < c.num_experts; ++e) {
        std::byte* to = memory + e * (2 * in_bytes + out_bytes);
        experts.push_back({load(to, kWidth, c.hidden), load(to + in_bytes, kWidth, c.hidden),
                           load(to + 2 * in_bytes, c.hidden, kWidth)});
      }
      const MlpWeights shared = {rig.Load(matrix(32, c.hidden), 32, c.hidden, WeightType::kBf16),
                                 rig.Load(matrix(32, c.hidden), 32, c.hidden, WeightType::kBf16),
                                 rig.Load(matrix(c.hidden, 32), c.hidden, 32, WeightType::kBf16)};
      const int64_t count = int64_t{c.tokens} * c.hidden;
      std::vector<float> rows = Bf16Values(count, 3, rng);
      for (int64_t i = 0; c.equal_tokens && i < count; ++i) rows[i] = rows[i % c.hidden];
      void* x = Output(rig, count);
      void* y = rig.Upload(rows);
      const float* before = Vector(rig, Bf16Values(c.hidden, 1, rng));
      const float* after = Vector(rig, Bf16Values(c.hidden, 1, rng));
      std::vector<int32_t> chosen(static_cast<size_t>(c.tokens) * kChosen);
      MoeArgs args = {.num_tokens = c.tokens,
                      .hidden = c.hidden,
                      .x = x,
                      .out = y,
                      .router = rig.Load(matrix(c.num_experts, c.hidden), c.num_experts, c.hidden,
                                         WeightType::kBf16),
                      .experts = experts,
                      .shared = &shared,
                      .experts_per_token = kChosen,
                      .renormalize = true,
                      .routed_scale = 1.5f,
                      .num_groups = 4,
                      .topk_groups = 3};
      if (fused) {
        args.first_norm = before;
        args.norm = after;
        args.norm_eps = 1e-5f;
        args.normed = x;
      } else {
        rig.ops().RmsNorm(c.tokens, c.hidden, y, before, 1e-5f, x);
        args.choice.record = chosen.data();  // By launches of their own
      }
      rig.ops().Moe(args);
      if (!fused) rig.ops().RmsNorm(c.tokens, c.hidden, y, after, 1e-5f, x);
      std::vector<float> result = ValuesOf(rig, y, count);
      const std::vector<float> normed = ValuesOf(rig, x, count);
      result.insert(result.end(), normed.begin(), normed.end());
      return result;
    };
    SCOPED_TRACE(std::to_string(c.tokens) + " tokens of " + std::to_string(c.hidden) + ", " +
                 std::to_string(c.num_experts) + " experts");
    CudaRig cuda(limits, {.compute = GetParam()});
    // The factor of the first norm may differ in its last bit, and so a value in its own.
    const bool is_bf16 = GetParam() == ComputeType::kBf16;
    ExpectClose(run(cuda, true), run(cuda, false), is_bf16 ? 5e-3 : 1e-5,
                is_bf16 ? 2.02 * kBf16Round : 1e-5);
    if (c.hidden > 100) continue;
    OpsRig cpu(1, limits);
    EXPECT_EQ(run(cpu, true), run(cpu, false));
  }
}

// The norm at the end takes its sums as a norm call does: the same bits.
TEST_P(CudaFusedTest, TheNormAtTheEndHasTheBitsOfANormCall) {
  for (const int hidden : {64, 65, 2048, 4096, 6000, 8200}) {
    constexpr int kTokens = 19, kChosen = 3;
    const OpsLimits limits = {.max_tokens = 32,
                              .hidden = hidden,
                              .max_mlp_width = 32,
                              .num_heads = 2,
                              .max_head_dim = 32};
    CudaRig cuda(limits, {.compute = GetParam()});
    const int64_t count = int64_t{kTokens} * hidden;
    const bool f32 = GetParam() == ComputeType::kF32;
    const std::vector<float> before = Bf16Values(count, 2, rng_);
    void* out = cuda.Upload(before);
    void* alone = cuda.Upload(before);
    void* normed = cuda.Poisoned(count);
    void* want = cuda.Poisoned(count);
    const float* norm = Vector(cuda, Bf16Values(hidden, 1, rng_));
    kernels::CombineCuda args = {.type = f32 ? kernels::ValueType::kF32 : kernels::ValueType::kBf16,
                                 .num_tokens = kTokens,
                                 .k = kChosen,
                                 .hidden = hidden,
                                 .results = cuda.Upload(Bf16Values(kChosen * count, 1, rng_)),
                                 .weights = Vector(cuda, Bf16Values(kTokens * kChosen, 1, rng_)),
                                 .out = out,
                                 .norm = norm,
                                 .norm_eps = 1e-5f,
                                 .normed = normed};
    const cudaStream_t stream = cuda.device().compute().stream();
    ASSERT_EQ(kernels::LaunchCombine(stream, args), cudaSuccess);
    args.out = alone;
    args.norm = nullptr;
    ASSERT_EQ(kernels::LaunchCombine(stream, args), cudaSuccess);
    cuda.ops().RmsNorm(kTokens, hidden, alone, norm, 1e-5f, want);
    EXPECT_EQ(cuda.Download(out, count), cuda.Download(alone, count)) << hidden;
    EXPECT_EQ(cuda.Download(normed, count), cuda.Download(want, count)) << hidden;
  }
}

TEST_P(CudaFusedTest, MatricesBehindEachOtherMultiplyAsOne) {
  const OpsLimits limits = {
      .max_tokens = 40, .hidden = 256, .max_mlp_width = 64, .num_heads = 2, .max_head_dim = 32};
  CudaRig cuda(limits, {.compute = GetParam()});
  constexpr int64_t kCols = 256;
  const int64_t rows[] = {96, 32, 64};
  std::byte* memory = cuda.Allocate(200 * kCols * 4);
  std::vector<Matrix> parts;
  std::byte* at = memory;
  for (const int64_t n : rows) {
    parts.push_back(cuda.LoadTo(at, Bf16Values(n * kCols, 0.0625f, rng_), n, kCols,
                                WeightType::kBf16, WeightFormat::kSource));
    at += cuda.ops().footprint().matrix_bytes(WeightType::kBf16, WeightFormat::kSource, n, kCols);
  }
  const std::optional<Matrix> whole = cuda.ops().Join(parts);
  ASSERT_TRUE(whole.has_value());
  EXPECT_EQ(whole->rows, 192);
  for (const int tokens : {1, 9, 40}) {
    void* x = cuda.Upload(Bf16Values(tokens * kCols, 1, rng_));
    void* y = cuda.Poisoned(tokens * whole->rows);
    cuda.ops().Linear(tokens, x, *whole, y);
    const std::vector<float> got = cuda.Download(y, tokens * whole->rows);
    int64_t first = 0;
    for (const Matrix& part : parts) {
      void* own = cuda.Poisoned(tokens * part.rows);
      cuda.ops().Linear(tokens, x, part, own);
      std::vector<float> rows_of_part;
      for (int t = 0; t < tokens; ++t) {
        const float* from = got.data() + t * whole->rows + first;
        rows_of_part.insert(rows_of_part.end(), from, from + part.rows);
      }
      ExpectClose(rows_of_part, cuda.Download(own, tokens * part.rows), 1e-5,
                  GetParam() == ComputeType::kBf16 ? 1.01 * kBf16Round : 1e-5);
      first += part.rows;
    }
  }
  std::swap(parts[0], parts[1]);
  EXPECT_FALSE(cuda.ops().Join(parts).has_value());
}

TEST_P(CudaFusedTest, MlaTakesRowsOfOneProduct) {
  constexpr int kHeads = 4, kNope = 24, kRope = 16, kLatent = 72;
  constexpr int kQ = kHeads * (kNope + kRope), kKv = kLatent + kRope;
  const KvGeometry kv = {.num_kv_heads = 1,
                         .k_dim = PadDim(kLatent + kRope),
                         .v_dim = PadDim(kLatent),
                         .value_in_key = true};
  const OpsLimits limits = {
      .max_tokens = 40, .hidden = 256, .max_mlp_width = 64, .num_heads = 4, .max_head_dim = 96};
  for (const int tokens : {1, 3, 12, 30}) {
    const std::vector<float> rows = Bf16Values(int64_t{tokens} * (kQ + kKv), 1, rng_);
    const std::vector<float> norm = Bf16Values(kLatent, 1, rng_);
    const std::vector<float> up = Bf16Values(int64_t{kHeads} * kLatent * kNope, 0.2f, rng_);
    const auto run = [&](auto& rig, bool joined) {
      std::vector<float> q, kv_a;
      for (int t = 0; t < tokens; ++t) {
        const float* row = rows.data() + t * (kQ + kKv);
        q.insert(q.end(), row, row + kQ);
        kv_a.insert(kv_a.end(), row + kQ, row + kQ + kKv);
      }
      std::vector<Matrix> key_up;
      for (int h = 0; h < kHeads; ++h) {
        const float* from = up.data() + h * kLatent * kNope;
        key_up.push_back(
            rig.Load({from, from + kLatent * kNope}, kLatent, kNope, WeightType::kBf16));
      }
      auto* whole = static_cast<std::byte*>(static_cast<void*>(rig.Upload(rows)));
      std::byte* block = rig.Allocate(kv.block_bytes());
      std::vector<int64_t> positions(tokens);
      std::iota(positions.begin(), positions.end(), 70);
      std::vector<KvTarget> targets;
      for (int t = 0; t < tokens; ++t) targets.push_back({block, t});
      const int64_t q_floats = int64_t{tokens} * kHeads * kv.k_dim;
      float* q_out = rig.Floats(q_floats);
      MlaPrepareArgs args = {.num_tokens = tokens,
                             .num_heads = kHeads,
                             .nope_dim = kNope,
                             .rope_dim = kRope,
                             .latent_dim = kLatent,
                             .kv = kv,
                             .kv_norm = Vector(rig, norm),
                             .norm_eps = 1e-6f,
                             .rope = {Vector(rig, InverseFrequencies(kRope / 2)), kRope, 1},
                             .scale_log2 = 0.3f,
                             .key_up = key_up,
                             .positions = positions,
                             .targets = targets,
                             .q_out = q_out};
      args.q = joined ? whole : static_cast<void*>(rig.Upload(q));
      args.kv_a =
          joined ? whole + kQ * rig.ops().activation_bytes() : static_cast<void*>(rig.Upload(kv_a));
      if (joined) args.token_stride = kQ + kKv;
      rig.ops().MlaPrepare(args);
      std::vector<float> result = FloatsOf(rig, q_out, q_floats);
      for (const std::byte b : BytesOf(rig, block, kv.block_bytes())) {
        result.push_back(static_cast<float>(b));
      }
      return result;
    };
    OpsRig cpu(2, limits);
    EXPECT_EQ(run(cpu, true), run(cpu, false));
    CudaRig cuda(limits, {.compute = GetParam()});
    ExpectClose(run(cuda, true), run(cuda, false), 1e-5, 1e-5);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, CudaFusedTest,
                         ::testing::Values(ComputeType::kF32, ComputeType::kBf16),
                         [](const auto& info) {
                           return info.param == ComputeType::kF32 ? "f32" : "bf16";
                         });

}  // namespace
}  // namespace writescope::ops
