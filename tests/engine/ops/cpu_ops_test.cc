// The small operations, and what Create and the limits promise.
#include "engine/ops/cpu_ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "engine/kernels/elementwise.h"
#include "tests/engine/ops/ops_rig.h"
#include "tests/support/seed.h"

namespace writescope::ops {
namespace {

using testing_support::TestSeed;

OpsLimits SomeLimits() {
  return {.max_tokens = 16,
          .hidden = 64,
          .max_mlp_width = 96,
          .num_experts = 8,
          .experts_per_token = 2,
          .num_heads = 4,
          .max_head_dim = 32};
}

TEST(CreateCpuOps, TakesTheWorkspaceThatItAnnounces) {
  auto device = device::CpuDevice::Create({.budget_bytes = int64_t{1} << 26});
  ASSERT_TRUE(device.ok());
  const int64_t announced = CpuOpsWorkspaceBytes(SomeLimits());
  EXPECT_GT(announced, 0);
  const auto ops = CreateCpuOps(**device, SomeLimits());
  ASSERT_TRUE(ops.ok()) << ops.status();
  constexpr int64_t kPage = 4096;  // The device counts whole pages.
  EXPECT_EQ((*device)->device_used_bytes(), (announced + kPage - 1) / kPage * kPage);
}

TEST(CreateCpuOps, SaysWhenTheBudgetHasNoRoom) {
  auto device = device::CpuDevice::Create({.budget_bytes = 8192});
  ASSERT_TRUE(device.ok());
  EXPECT_EQ(CreateCpuOps(**device, SomeLimits()).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(CreateCpuOps, RefusesEmptyLimits) {
  auto device = device::CpuDevice::Create({.budget_bytes = 1 << 20});
  ASSERT_TRUE(device.ok());
  EXPECT_EQ(CreateCpuOps(**device, OpsLimits{}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(CpuOps, FootprintIsWhatCreateTakes) {
  const OpsFootprint footprint = CpuOpsFootprint();
  EXPECT_EQ(footprint.workspace_bytes(SomeLimits()), CpuOpsWorkspaceBytes(SomeLimits()));
  EXPECT_EQ(footprint.matrix_bytes(WeightType::kBf16, WeightFormat::kSource, 3, 5), 64);
  EXPECT_EQ(footprint.matrix_bytes(WeightType::kF32, WeightFormat::kSource, 3, 5), 64);
  EXPECT_EQ(footprint.matrix_bytes(WeightType::kF32, WeightFormat::kSource, 16, 5), 320);
  EXPECT_EQ(footprint.activation_bytes, 4);
}

TEST(CpuOps, LinearMatchesTheTwin) {
  std::mt19937_64 rng(TestSeed());
  struct Size {
    int rows, n, k;
  };
  // Few rows and many, panels and item borders that are not full; some large enough for the team.
  for (const Size& size : {Size{1, 5, 33},
                           {3, 1111, 700},
                           {64, 300, 64},
                           {65, 130, 1030},
                           {300, 257, 65},
                           {517, 129, 96}}) {
    for (const WeightType type : {WeightType::kF32, WeightType::kBf16}) {
      for (const bool accumulate : {false, true}) {
        const std::vector<float> w = Bf16Values(int64_t{size.n} * size.k, 1, rng);
        const std::vector<float> x = Bf16Values(int64_t{size.rows} * size.k, 1, rng);
        const std::vector<float> y = Bf16Values(int64_t{size.rows} * size.n, 1, rng);
        const std::vector<float> got = SameForAnyThreads([&](int num_threads) {
          OpsRig rig(num_threads, SomeLimits());
          float* out = rig.Upload(y);
          rig.ops().Linear(size.rows, rig.Upload(x), rig.Load(w, size.n, size.k, type), out,
                           accumulate);
          return rig.Download(out, int64_t{size.rows} * size.n);
        });
        std::vector<double> want = MatMul(ToDouble(x), w, size.rows, size.n, size.k);
        for (size_t i = 0; i < want.size() && accumulate; ++i) want[i] += y[i];
        // Errors of 2^-24 of a running total of about sqrt(k), k times; by experience a tenth of
        // it.
        ExpectNear(got, want, 0x1p-24 * size.k * std::sqrt(size.k));
      }
    }
  }
}

TEST(CpuOps, EmbedLooksUpRows) {
  std::mt19937_64 rng(TestSeed());
  const std::vector<float> table = Bf16Values(7 * 20, 1, rng);
  for (const WeightType type : {WeightType::kF32, WeightType::kBf16}) {
    OpsRig rig(1, SomeLimits());
    const std::vector<TokenId> ids = {6, 0, 3, 3};
    float* out = rig.Floats(4 * 20);
    rig.ops().Embed(ids, rig.Load(table, 7, 20, type), out);
    const std::vector<float> got = rig.Download(out, 4 * 20);
    for (int i = 0; i < 4 * 20; ++i) EXPECT_EQ(got[i], table[ids[i / 20] * 20 + i % 20]);
  }
}

TEST(CpuOps, RmsNormMatchesTheTwin) {
  std::mt19937_64 rng(TestSeed());
  for (const auto& [rows, dim] : {std::pair<int, int>{1, 64}, {37, 1000}, {700, 64}}) {
    const std::vector<float> x = Bf16Values(rows * dim, 3, rng);
    const std::vector<float> weight = Bf16Values(dim, 1, rng);
    const std::vector<float> got = SameForAnyThreads([&](int num_threads) {
      OpsRig rig(num_threads, SomeLimits());
      float* out = rig.Floats(rows * dim);
      rig.ops().RmsNorm(rows, dim, rig.Upload(x), rig.Upload(weight), 1e-5f, out);
      return rig.Download(out, rows * dim);
    });
    std::vector<double> want(rows * dim);
    for (int r = 0; r < rows; ++r) {
      kernels::RmsNormRowRef(dim, &x[r * dim], weight.data(), 1e-5f, &want[r * dim]);
    }
    ExpectNear(got, want, 1e-5);
  }
}

TEST(CpuOps, GathersAndCopies) {
  OpsRig rig(1, SomeLimits());
  std::vector<float> x(5 * 3);
  std::iota(x.begin(), x.end(), 0.0f);
  float* device_x = rig.Upload(x);
  float* out = rig.Floats(2 * 3);
  const std::vector<int> rows = {4, 1};
  rig.ops().GatherRows(rows, 3, device_x, out);
  EXPECT_EQ(rig.Download(out, 6), (std::vector<float>{12, 13, 14, 3, 4, 5}));
  std::vector<float> published(15);
  std::atomic<uint64_t> ready{0};
  double began_s = 0, ended_s = 0;
  const double before_s = device::NowSeconds();
  rig.ops().PublishQueries({.num_values = 15,
                            .q = device_x,
                            .to = published.data(),
                            .ready = &ready,
                            .value = 7,
                            .began_s = &began_s,
                            .ended_s = &ended_s});
  rig.Finish();
  EXPECT_EQ(published, x);
  EXPECT_EQ(ready.load(), 7u);
  EXPECT_GE(began_s, before_s);
  EXPECT_GE(ended_s, began_s);
}

// Arrays of the caller may be gone when the queue gets there.
TEST(CpuOps, CopiesTheArraysItIsGiven) {
  OpsRig rig(1, SomeLimits());
  const Matrix table = rig.Load({1, 2, 3, 4}, 4, 1, WeightType::kF32);
  float* out = rig.Floats(2);
  {
    std::vector<TokenId> ids = {3, 1};
    rig.ops().Embed(ids, table, out);
    ids = {0, 0};
  }
  EXPECT_EQ(rig.Download(out, 2), (std::vector<float>{4, 2}));
}

TEST(CpuOps, LoadMatrixRefusesWhatItCannotMultiplyBy) {
  OpsRig rig(1, SomeLimits());
  const auto code = [&rig](WeightType source, WeightFormat format, int64_t rows) {
    return rig.ops().LoadMatrix(nullptr, source, format, rows, 4, nullptr).status().code();
  };
  EXPECT_EQ(code(WeightType::kF32, WeightFormat::kSource, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(WeightType::kInt4, WeightFormat::kSource, 4), absl::StatusCode::kInvalidArgument);
}

TEST(CpuOps, RandomMatricesAreSeededAndAboutNormal) {
  OpsRig rig(1, SomeLimits());
  constexpr int64_t kRows = 100, kCols = 101;
  constexpr float kSigma = 0.02f;
  const auto make = [&rig](uint64_t seed) {
    auto matrix = rig.ops().RandomMatrix(rig.Allocate(kRows * kCols * 4), WeightType::kF32,
                                         WeightFormat::kSource, kRows, kCols, kSigma, seed);
    EXPECT_TRUE(matrix.ok()) << matrix.status();
    return rig.Download(reinterpret_cast<const float*>(matrix->data), kRows * kCols);
  };
  const std::vector<float> values = make(1);
  EXPECT_EQ(values, make(1));
  EXPECT_NE(values, make(2));
  double sum = 0, squares = 0;
  for (const float value : values) {
    EXPECT_LT(std::abs(value), 3.5f * kSigma);
    sum += value;
    squares += value * value;
  }
  constexpr double kCount = kRows * kCols;  // Standard errors: 1 % of sigma, and 0.7 % of sigma.
  EXPECT_NEAR(sum / kCount, 0, 0.05 * kSigma);
  EXPECT_NEAR(std::sqrt(squares / kCount), kSigma, 0.03 * kSigma);
}

TEST(CpuOps, LoadsVectors) {
  OpsRig rig(1, SomeLimits());
  const std::vector<float> values = {1, 2.5f, -3};
  auto vector = rig.ops().LoadVector(rig.Allocate(Ops::vector_bytes(3)), 3, values.data());
  ASSERT_TRUE(vector.ok()) << vector.status();
  EXPECT_EQ(rig.Download(*vector, 3), values);
}

TEST(CpuOpsDeathTest, ATokenOutsideTheVocabularyEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  OpsRig rig(1, SomeLimits());
  const Matrix table = rig.Load({1, 2, 3, 4}, 4, 1, WeightType::kF32);
  const std::vector<TokenId> ids = {4};
  EXPECT_DEATH(rig.ops().Embed(ids, table, nullptr), "token 4 of a vocabulary of 4");
}

}  // namespace
}  // namespace writescope::ops
