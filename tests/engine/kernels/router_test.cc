#include "engine/kernels/router.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tests/support/seed.h"

namespace writescope::kernels {
namespace {

using Experts = std::vector<int32_t>;

TEST(Router, MatchesTheTwin) {
  std::mt19937_64 rng(testing_support::TestSeed());
  std::normal_distribution<float> normal(0, 2);
  for (const auto& [num_experts, k, groups, topk_groups] :
       {std::tuple<int, int, int, int>{8, 2, 1, 1},
        {8, 8, 1, 1},
        {64, 6, 1, 1},
        {128, 8, 1, 1},
        {160, 6, 8, 3},
        {8, 3, 4, 2}}) {
    for (const bool renormalize : {false, true}) {
      for (int i = 0; i < 50; ++i) {
        const RouterConfig config = {.num_experts = num_experts,
                                     .experts_per_token = k,
                                     .renormalize = renormalize,
                                     .routed_scale = 2.5f,
                                     .num_groups = groups,
                                     .topk_groups = topk_groups};
        std::vector<float> logits(num_experts);
        // Every other time from few values, so that there are ties.
        for (float& value : logits) value = i % 2 == 0 ? normal(rng) : std::floor(normal(rng));
        Experts want(k), got(k);
        std::vector<double> want_weights(k);
        std::vector<float> weights(k);
        RouteTokenRef(config, logits.data(), want.data(), want_weights.data());
        std::vector<float> scratch = logits;
        RouteToken(config, scratch.data(), got.data(), weights.data());
        ASSERT_EQ(got, want) << num_experts << " experts, " << groups << " groups";
        for (int j = 0; j < k; ++j) EXPECT_NEAR(weights[j], want_weights[j], 1e-5);
        std::vector<float> again(k);
        scratch = logits;
        WeighChosen(config, scratch.data(), got.data(), again.data());
        EXPECT_EQ(again, weights);
      }
    }
  }
}

TEST(Router, TheLowestIndexWinsATie) {
  const RouterConfig config = {.num_experts = 6, .experts_per_token = 3};
  std::vector<float> logits = {1, 2, 1, 2, 1, 0};
  Experts experts(3);
  std::vector<float> weights(3);
  RouteToken(config, logits.data(), experts.data(), weights.data());
  EXPECT_EQ(experts, (Experts{1, 3, 0}));
}

TEST(Router, OnlyTheBestGroupsAreEligible) {
  // The best expert is alone in its group; the second best two are in a group that is left out.
  const RouterConfig config = {.num_experts = 6,
                               .experts_per_token = 2,
                               .renormalize = true,
                               .routed_scale = 1,
                               .num_groups = 3,
                               .topk_groups = 1};
  std::vector<float> logits = {4, 4, 5, -9, 3, 3};
  Experts experts(2);
  std::vector<float> weights(2);
  RouteToken(config, logits.data(), experts.data(), weights.data());
  EXPECT_EQ(experts, (Experts{2, 3}));
  EXPECT_NEAR(weights[0] + weights[1], 1, 1e-6);
}

TEST(Router, NanNeverChoosesAnExpertThatIsNotThere) {
  const RouterConfig config = {.num_experts = 4, .experts_per_token = 2};
  std::vector<float> logits = {NAN, NAN, NAN, NAN};
  Experts experts(2);
  std::vector<float> weights(2);
  RouteToken(config, logits.data(), experts.data(), weights.data());
  EXPECT_EQ(experts, (Experts{0, 1}));
  EXPECT_TRUE(std::isnan(weights[0]));
}

}  // namespace
}  // namespace writescope::kernels
