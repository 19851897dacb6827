#include "engine/kernels/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "engine/base/bf16.h"
#include "tests/support/seed.h"

namespace writescope::kernels {
namespace {

// x, W and y of one product, rows of x and y apart from each other.
struct Problem {
  Problem(int64_t num_rows, int64_t n, int64_t k, GemmWeights type, bool accumulate,
          std::mt19937_64& rng)
      : x_stride(k + 3), y_stride(n + 5) {
    std::normal_distribution<float> normal;
    x.resize(num_rows * x_stride);
    y.resize(num_rows * y_stride);
    w.resize(n * GemmRowBytes(type, k));
    for (float& value : x) value = normal(rng);
    for (float& value : y) value = normal(rng);
    std::vector<float> row(k);
    for (int64_t r = 0; r < n; ++r) {
      for (float& value : row) value = normal(rng);
      std::byte* to = w.data() + r * GemmRowBytes(type, k);
      if (type == GemmWeights::kInt4) {
        QuantizeInt4Row(k, row.data(), to);
      } else if (type == GemmWeights::kF32) {
        std::memcpy(to, row.data(), k * sizeof(float));
      } else {
        for (int64_t i = 0; i < k; ++i) {
          const uint16_t half = FloatToBf16(row[i]);
          std::memcpy(to + 2 * i, &half, 2);
        }
      }
    }
    args = {.num_rows = num_rows,
            .n = n,
            .k = k,
            .x = x.data(),
            .x_stride = x_stride,
            .w = w.data(),
            .type = type,
            .y = y.data(),
            .y_stride = y_stride,
            .accumulate = accumulate};
  }

  int64_t x_stride, y_stride;
  std::vector<float> x, y;
  std::vector<std::byte> w;
  GemmArgs args;
};

template <typename Run>
void ExpectLikeTheTwin(Problem& problem, const Run& run) {
  std::vector<float> want = problem.y;
  GemmArgs ref_args = problem.args;
  ref_args.y = want.data();
  GemmRef(ref_args);
  run(problem.args);
  // k products of N(0, 1) values: a running total of up to 4 sqrt(k), rounded k times by 2^-24 of
  // itself; as a random walk that is 4 k 2^-24, and three times that for the worst of many.
  const double bound = 12 * 0x1p-24 * static_cast<double>(problem.args.k + 8);
  for (size_t i = 0; i < want.size(); ++i) {
    // Exactly equal between the rows, where nothing may be written.
    const bool inside = static_cast<int64_t>(i) % problem.y_stride < problem.args.n;
    ASSERT_NEAR(problem.y[i], want[i], inside ? bound : 0)
        << problem.args.num_rows << " x " << problem.args.n << " x " << problem.args.k << " at "
        << i;
  }
}

class SmallGemmTest : public testing::TestWithParam<SmallGemmVariant> {};

TEST_P(SmallGemmTest, MatchesTheTwin) {
  if (GetParam().isa > DetectedCpuIsa()) GTEST_SKIP() << GetParam().name << ": not on this CPU";
  std::mt19937_64 rng(testing_support::TestSeed());
  for (const int64_t num_rows : {0, 1, 2, 3, 4, 5, 7, 8, 33}) {
    for (const int64_t n : {1, 3, 4, 6, 128}) {
      for (const int64_t k : {1, 15, 16, 17, 24, 32, 96, 333}) {
        for (const GemmWeights type : {GemmWeights::kF32, GemmWeights::kBf16}) {
          Problem problem(num_rows, n, k, type, (num_rows + n + k) % 2 == 0, rng);
          ExpectLikeTheTwin(problem, GetParam().run);
        }
      }
    }
  }
}

TEST_P(SmallGemmTest, ARowDoesNotDependOnItsCompany) {
  if (GetParam().isa > DetectedCpuIsa()) GTEST_SKIP() << GetParam().name << ": not on this CPU";
  std::mt19937_64 rng(testing_support::TestSeed());
  for (const GemmWeights type : {GemmWeights::kF32, GemmWeights::kBf16}) {
    Problem problem(7, 13, 101, type, false, rng);
    GetParam().run(problem.args);
    const std::vector<float> together = problem.y;
    for (int64_t row = 0; row < 7; ++row) {
      for (int64_t n = 0; n < 13; ++n) {
        GemmArgs alone = problem.args;
        alone.num_rows = 1;
        alone.n = 1;
        alone.x += row * problem.x_stride;
        alone.w += n * GemmRowBytes(type, 101);
        float y = 0;
        alone.y = &y;
        GetParam().run(alone);
        EXPECT_EQ(y, together[row * problem.y_stride + n]) << row << ", " << n;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, SmallGemmTest,
                         testing::ValuesIn(SmallGemmVariants().begin(), SmallGemmVariants().end()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(GemmPanel, MatchesTheTwinOnBothPaths) {
  std::mt19937_64 rng(testing_support::TestSeed());
  std::vector<float> scratch(kGemmScratchFloats);
  for (const int64_t num_rows :
       {int64_t{0}, int64_t{1}, kSmallGemmRows, kSmallGemmRows + 1, int64_t{130}}) {
    for (const auto& [n, k] :
         {std::pair<int64_t, int64_t>{1, 40}, {37, 129}, {128, 1024}, {128, 1025}, {5, 2100}}) {
      for (const GemmWeights type : {GemmWeights::kF32, GemmWeights::kBf16, GemmWeights::kInt4}) {
        for (const bool accumulate : {false, true}) {
          Problem problem(num_rows, n, k, type, accumulate, rng);
          ExpectLikeTheTwin(problem,
                            [&](const GemmArgs& args) { GemmPanel(args, scratch.data()); });
        }
      }
    }
  }
}

TEST(GemmPanel, OverwritesWhatIsNotANumber) {
  std::mt19937_64 rng(testing_support::TestSeed());
  std::vector<float> scratch(kGemmScratchFloats);
  for (const int64_t num_rows : {int64_t{3}, kSmallGemmRows + 1}) {
    Problem problem(num_rows, 16, 64, GemmWeights::kBf16, false, rng);
    for (float& value : problem.y) value = NAN;
    GemmPanel(problem.args, scratch.data());
    for (int64_t row = 0; row < num_rows; ++row) {
      for (int64_t n = 0; n < 16; ++n) {
        EXPECT_FALSE(std::isnan(problem.y[row * problem.y_stride + n]));
      }
    }
  }
}

TEST(BlasSelfTest, PassesHere) { EXPECT_EQ(BlasSelfTest(), ""); }

}  // namespace
}  // namespace writescope::kernels
