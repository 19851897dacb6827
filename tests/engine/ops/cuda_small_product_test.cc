// The two kernels of a product of few rows: the same bits. The plain one is held to the twin in
// double by cuda_ops_test.cc.
#include <gtest/gtest.h>

#include "engine/kernels/cuda/expert_gemm.h"
#include "engine/kernels/cuda/small_product.h"
#include "tests/engine/ops/cuda_ops_rig.h"
#include "tests/support/gpu.h"
#include "tests/support/seed.h"

namespace writescope::ops {
namespace {

using kernels::SmallProductArgs;
using kernels::ValueType;
using testing_support::TestSeed;

TEST(CudaSmallProduct, TheRingGivesTheBitsOfThePlainKernel) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 rng(TestSeed());
  CudaRig rig({.max_tokens = 1, .hidden = 8, .num_heads = 1, .max_head_dim = 8}, {});
  const cudaStream_t stream = rig.device().compute().stream();
  // Less than a row for each multiprocessor, several tiles of rows, a last tile of one row; columns
  // within a stage, whole stages, one part of the last, and more than registers hold of x.
  for (const auto& [rows, cols] : {std::pair<int, int>{40, 512},
                                   {2048, 4096},
                                   {5120, 2048},
                                   {132 * 17, 1032},
                                   {777, 6152},
                                   {140, 6152},
                                   {300, 8}}) {
    if (testing::LeftOut(int64_t{rows} * cols < 2'500'000)) continue;
    const Matrix w =
        rig.Load(Bf16Values(int64_t{rows} * cols, 0.05f, rng), rows, cols, WeightType::kBf16);
    for (const int num_rows : {1, 5, 8}) {
      if (testing::LeftOut(num_rows == 5)) continue;
      for (const bool accumulate : {false, true}) {
        if (testing::LeftOut(!accumulate)) continue;
        SCOPED_TRACE(std::to_string(num_rows) + " rows, " + std::to_string(rows) + " x " +
                     std::to_string(cols));
        const int64_t count = int64_t{num_rows} * rows;
        SmallProductArgs args = {.num_rows = num_rows,
                                 .rows = rows,
                                 .cols = cols,
                                 .x = rig.Upload(Bf16Values(int64_t{num_rows} * cols, 1, rng)),
                                 .x_stride = cols,
                                 .w = w.data,
                                 .w_stride = kernels::Bf16Stride(cols),
                                 .y_type = ValueType::kBf16,
                                 .y_stride = rows,
                                 .alpha = 0.75f,
                                 .accumulate = accumulate};
        if (!kernels::RunsSmallProductRing(args)) GTEST_SKIP() << "not on this GPU";
        const std::vector<float> before = Bf16Values(count, 1, rng);
        const auto run = [&](const auto& launch) {
          args.y = accumulate ? rig.Upload(before) : rig.Poisoned(count);
          EXPECT_EQ(launch(stream, args), cudaSuccess);
          return rig.Bytes(args.y, count * 2);
        };
        const auto ring = run(&kernels::LaunchSmallProductRing);
        EXPECT_TRUE(ring == run(&kernels::LaunchSmallProductPlain));
        if (accumulate) continue;
        // Results of float32, too: there a sum taken in another order shows.
        args.y_type = ValueType::kF32;
        const auto run_floats = [&](const auto& launch) {
          args.y = rig.Floats(count);
          EXPECT_EQ(launch(stream, args), cudaSuccess);
          return rig.Bytes(args.y, count * 4);
        };
        EXPECT_TRUE(run_floats(&kernels::LaunchSmallProductRing) ==
                    run_floats(&kernels::LaunchSmallProductPlain));
      }
    }
  }
}

}  // namespace
}  // namespace writescope::ops
