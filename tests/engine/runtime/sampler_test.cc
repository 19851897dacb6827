#include "engine/runtime/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <random>

#include "engine/runtime/error_reason.h"

namespace writescope::runtime {
namespace {

const std::vector<float> kLogits = {1.0f, 3.0f, 2.0f, 3.0f, -1.0f};

TokenId Greedy(const SamplingParams& params, const std::vector<float>& logits,
               std::vector<TokenId> prompt = {}, std::vector<TokenId> output = {}) {
  SamplingParams greedy = params;
  greedy.temperature = 0;
  Sampler sampler(greedy, 0, prompt);
  for (const TokenId token : output) sampler.Accept(token);
  return sampler.Sample(logits, 0, {}, std::nullopt)->token;
}

std::map<TokenId, int> Draws(const SamplingParams& params, int count) {
  Sampler sampler(params, 99, {});
  std::map<TokenId, int> draws;
  for (int i = 0; i < count; ++i) ++draws[sampler.Sample(kLogits, i, {}, std::nullopt)->token];
  return draws;
}

TEST(SamplerTest, GreedyTakesTheLowestOfEqualTokens) { EXPECT_EQ(Greedy({}, kLogits), 1); }

TEST(SamplerTest, BannedTokensCannotComeOut) {
  Sampler sampler({.temperature = 0}, 0, {});
  EXPECT_EQ(sampler.Sample(kLogits, 0, std::vector<TokenId>{1, 3}, std::nullopt)->token, 2);
}

TEST(SamplerTest, PenaltiesMoveLogitsTheRightWay) {
  // Divides what is above 0 and multiplies what is below: both become less likely.
  EXPECT_EQ(Greedy({.repetition_penalty = 2}, kLogits, {1}), 3);
  EXPECT_EQ(Greedy({.repetition_penalty = 2}, {-1.0f, -1.5f}, {0}), 1);
  EXPECT_EQ(Greedy({.presence_penalty = 1.5}, kLogits, {}, {1, 3}), 2);
  // However small the penalty is.
  EXPECT_EQ(Greedy({.repetition_penalty = 1e-40}, kLogits, {2}), 2);
  // Presence and frequency count the output alone.
  EXPECT_EQ(Greedy({.presence_penalty = 1.5}, kLogits, {1, 3}), 1);
  EXPECT_EQ(Greedy({.frequency_penalty = 0.6}, kLogits, {}, {1, 1, 3}), 3);
}

TEST(SamplerTest, DrawsFollowTheDistribution) {
  const int n = 40000;
  const auto draws = Draws({.temperature = 1}, n);
  double total = 0;
  for (const float logit : kLogits) total += std::exp(logit);
  for (size_t token = 0; token < kLogits.size(); ++token) {
    const double p = std::exp(kLogits[token]) / total;
    const double sigma = std::sqrt(p * (1 - p) / n);
    EXPECT_NEAR(static_cast<double>(draws.at(static_cast<TokenId>(token))) / n, p, 5 * sigma);
  }
}

TEST(SamplerTest, FiltersKeepTheBestTokens) {
  EXPECT_EQ(Draws({.temperature = 5, .top_k = 1}, 200).size(), 1u);
  EXPECT_EQ(Draws({.temperature = 5, .top_k = 3}, 2000).size(), 3u);
  // The two best hold 0.794 of the probability.
  EXPECT_EQ(Draws({.temperature = 1, .top_p = 0.79}, 2000).size(), 2u);
  EXPECT_EQ(Draws({.temperature = 1, .top_p = 1e-6}, 200).size(), 1u);
  EXPECT_EQ(Draws({.temperature = 1, .min_p = 0.3}, 4000).size(), 3u);
  EXPECT_EQ(Draws({.temperature = 1e-4}, 500).size(), 2u);
}

TEST(SamplerTest, ArgMaxFindsTheFirstOfTheLargestAnywhere) {
  for (const size_t size : {1u, 15u, 16u, 17u, 1023u, 1024u, 1025u, 5000u}) {
    for (const size_t at : {size_t{0}, size / 2, size - 1}) {
      std::vector<float> logits(size, -3.0F);
      logits[at] = -1;
      logits[size - 1] = -1;
      EXPECT_EQ(ArgMax(logits), static_cast<TokenId>(at)) << size;
    }
  }
}

TEST(SamplerTest, TopPOfALargeVocabularyIsItsShortestHead) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> logits(5000);
  for (float& logit : logits) logit = normal(random);
  for (const double top_p : {0.05, 0.5, 0.95}) {
    std::vector<float> sorted = logits;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    double total = 0, kept = 0;
    for (const float logit : sorted) total += std::exp(logit);
    size_t head = 0;
    while (kept < top_p * total) kept += std::exp(sorted[head++]);
    const float least = sorted[head - 1];
    Sampler sampler({.temperature = 1, .top_p = top_p}, 1, {});
    float lowest_drawn = sorted[0];
    for (int i = 0; i < 4000; ++i) {
      const TokenId token = sampler.Sample(logits, i, {}, std::nullopt)->token;
      lowest_drawn = std::min(lowest_drawn, logits[static_cast<size_t>(token)]);
    }
    EXPECT_GE(lowest_drawn, least) << top_p;
    // Among so many draws one comes from the last tenth of the head.
    EXPECT_LE(lowest_drawn, sorted[head - head / 10 - 1]) << top_p;
  }
}

TEST(SamplerTest, ADrawDependsOnSeedAndPositionAlone) {
  Sampler a({.temperature = 1}, 5, {}), b({.temperature = 1}, 5, {}), c({.temperature = 1}, 6, {});
  bool differs = false;
  for (int i = 63; i >= 0; --i) {
    const TokenId token = a.Sample(kLogits, i, {}, std::nullopt)->token;
    EXPECT_EQ(token, b.Sample(kLogits, i, {}, std::nullopt)->token);
    differs |= token != c.Sample(kLogits, i, {}, std::nullopt)->token;
  }
  EXPECT_TRUE(differs);
}

TEST(SamplerTest, NanAndNoFiniteLogitAreErrors) {
  const float inf = std::numeric_limits<float>::infinity();
  Sampler sampler({.temperature = 0}, 0, {});
  for (const std::vector<float>& logits :
       {std::vector<float>{0, NAN, 1}, std::vector<float>{-inf, -inf},
        std::vector<float>{0, inf}}) {
    const auto sampled = sampler.Sample(logits, 0, {}, std::nullopt);
    EXPECT_EQ(ErrorReason(sampled.status()), "NUMERIC_FAILURE");
  }
}

TEST(SamplerTest, TheLargestLogitIsEnoughForGreedyAlone) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(Sampler({}, 0, {}).takes_largest());
  for (const SamplingParams& params :
       {SamplingParams{.temperature = 0, .repetition_penalty = 2},
        SamplingParams{.temperature = 0, .presence_penalty = 0.1},
        SamplingParams{.temperature = 0, .frequency_penalty = 0.1}}) {
    EXPECT_FALSE(Sampler(params, 0, {}).takes_largest());
  }
  Sampler sampler({.temperature = 0, .top_k = 3}, 0, {});
  ASSERT_TRUE(sampler.takes_largest());
  for (const std::vector<float>& logits :
       {kLogits, std::vector<float>{0, NAN, 1}, std::vector<float>{-inf, -inf},
        std::vector<float>{0, inf}, std::vector<float>{-inf, -2, -2}}) {
    const auto want = sampler.Sample(logits, 7, {}, std::nullopt);
    const auto got = Sampler::SampleLargest(
        kernels::MaxOfRow(static_cast<int64_t>(logits.size()), logits.data()), 7);
    EXPECT_EQ(got.status(), want.status());
    if (want.ok()) {
      EXPECT_EQ(got->token, want->token);
    }
  }
}

TEST(SamplerTest, LogprobsSumToOneAndRankTies) {
  const PositionLogprobs all = LogprobsOf(kLogits, 3, 5);
  double sum = 0;
  for (const TokenLogprob& t : all.top) sum += std::exp(t.logprob);
  EXPECT_NEAR(sum, 1, 1e-6);
  EXPECT_EQ(all.token->rank, 2);  // Token 1 has the same logit and comes first.
  EXPECT_EQ(all.top[0].token, 1);
  EXPECT_EQ(all.top[1].token, 3);
  EXPECT_TRUE(LogprobsOf(kLogits, 0, 0).top.empty());
}

}  // namespace
}  // namespace writescope::runtime
