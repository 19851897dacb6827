// Which kernel the experts' products take, by size and load; no GPU needed.
#include <gtest/gtest.h>

#include <utility>

#include "engine/kernels/cuda/expert_gemm.h"

namespace writescope::kernels {
namespace {

constexpr ExpertKernel kAll[] = {ExpertKernel::kSimt, ExpertKernel::kStream, ExpertKernel::kRing,
                                 ExpertKernel::kTile, ExpertKernel::kWide};

TEST(ExpertPlan, EveryKernelTakesPublishedModelsOf4Bits) {
  // Hidden and width of Qwen3-30B-A3B, DeepSeek-V2-Lite and Mixtral-8x7B.
  for (const auto& [hidden, width] : {std::pair{2048, 768}, {2048, 1408}, {4096, 14336}}) {
    for (const ExpertKernel kernel : kAll) {
      EXPECT_TRUE(TakesMatrix(kernel, {ExpertWeights::kInt4, width, hidden, true})) << width;
      EXPECT_TRUE(TakesMatrix(kernel, {ExpertWeights::kInt4, hidden, width, false})) << width;
    }
  }
}

TEST(ExpertPlan, RingAndWideTakeWholeGroupsAndUnitsOf4Bits) {
  for (const ExpertKernel kernel : {ExpertKernel::kRing, ExpertKernel::kWide}) {
    const int unit = kernel == ExpertKernel::kRing ? kRingRows : kWideRows;
    EXPECT_TRUE(TakesMatrix(kernel, {ExpertWeights::kInt4, unit, 128, false}));
    EXPECT_TRUE(TakesMatrix(kernel, {ExpertWeights::kInt4, unit / 2, 128, true}));
    EXPECT_FALSE(TakesMatrix(kernel, {ExpertWeights::kInt4, unit / 2, 128, false}));
    EXPECT_FALSE(TakesMatrix(kernel, {ExpertWeights::kInt4, unit, 136, false}));
    EXPECT_FALSE(TakesMatrix(kernel, {ExpertWeights::kInt4, unit + 16, 128, false}));
    EXPECT_FALSE(TakesMatrix(kernel, {ExpertWeights::kBf16, unit, 128, false}));
  }
}

TEST(ExpertPlan, OnlySimtTakesFloat32) {
  for (const ExpertKernel kernel : kAll) {
    EXPECT_EQ(TakesMatrix(kernel, {ExpertWeights::kF32, 256, 256, false}),
              kernel == ExpertKernel::kSimt);
  }
}

// More pairs never mean smaller tiles, and a kernel that cannot run is never chosen.
TEST(ExpertPlan, TilesGrowWithTheLoad) {
  for (const ExpertWeights weights : {ExpertWeights::kBf16, ExpertWeights::kInt4}) {
    for (const bool ring : {false, true}) {
      for (const bool wide : {false, true}) {
        int slots = 0;
        for (double pairs = 0.125; pairs < 1000; pairs *= 1.25) {
          const ExpertPlan plan = PlanExpertGemm({weights, pairs, ring, wide});
          EXPECT_GE(plan.tile_slots, slots) << pairs;
          slots = plan.tile_slots;
          EXPECT_TRUE(ring || plan.kernel != ExpertKernel::kRing);
          EXPECT_TRUE(wide || plan.kernel != ExpertKernel::kWide);
          EXPECT_NE(plan.kernel, ExpertKernel::kSimt);
        }
      }
    }
  }
}

TEST(ExpertPlan, DecodeTakesTheRingAndPromptsTheWideKernel) {
  ExpertPlanInput input = {.weights = ExpertWeights::kInt4, .ring = true, .wide = true};
  input.pairs_per_expert = 0.5;  // 8 tokens of Qwen3
  EXPECT_EQ(PlanExpertGemm(input).kernel, ExpertKernel::kRing);
  EXPECT_EQ(PlanExpertGemm(input).tile_slots, kRingSlotsFew);
  input.pairs_per_expert = 128;  // 2,048 tokens
  EXPECT_EQ(PlanExpertGemm(input).kernel, ExpertKernel::kWide);
  input.wide = false;
  EXPECT_EQ(PlanExpertGemm(input).kernel, ExpertKernel::kTile);
}

}  // namespace
}  // namespace writescope::kernels
