#include "controller/robust_mean.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "tests/support/seed.h"

namespace writescope::controller {
namespace {

using Verdict = RobustMean::Verdict;

TEST(RobustMeanTest, FirstSampleReplacesTheSeed) {
  RobustMean mean;
  EXPECT_EQ(mean.value(), 0);
  mean.Seed(100);
  EXPECT_EQ(mean.value(), 100);
  EXPECT_FALSE(mean.measured());
  EXPECT_EQ(mean.Add(7), Verdict::kAccepted);
  EXPECT_DOUBLE_EQ(mean.value(), 7);
  EXPECT_TRUE(mean.measured());
}

TEST(RobustMeanTest, RefusesWhatIsNoPositiveNumber) {
  RobustMean mean;
  mean.Add(5);
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(),
                           std::numeric_limits<double>::infinity(), -1.0, 0.0, 1e300, 1e-300}) {
    EXPECT_EQ(mean.Add(bad), Verdict::kRefused) << bad;
    mean.Seed(bad);
    mean.Scale(bad);
  }
  EXPECT_DOUBLE_EQ(mean.value(), 5);
}

TEST(RobustMeanTest, AveragesNoise) {
  std::mt19937_64 rng(testing_support::TestSeed());
  std::normal_distribution<double> noise(0, 0.1);
  RobustMean mean;
  double worst = 0;
  for (int i = 0; i < 5000; ++i) {
    mean.Add(50e9 * std::exp(noise(rng)));
    if (i > 100) worst = std::max(worst, std::abs(std::log(mean.value() / 50e9)));
  }
  EXPECT_LT(worst, 0.10) << "1.6 % is one deviation; a false change costs up to 5 %";
  EXPECT_NEAR(mean.deviation(), 0.1, 0.04);
}

TEST(RobustMeanTest, OneWildValueHardlyMovesIt) {
  RobustMean mean;
  for (int i = 0; i < 50; ++i) mean.Add(10);
  mean.Add(10000);
  EXPECT_NEAR(mean.value(), 10, 0.1);
  mean.Add(10);
  mean.Add(0.001);
  mean.Add(10);
  EXPECT_NEAR(mean.value(), 10, 0.1);
}

TEST(RobustMeanTest, AJumpIsFollowedAfterThreeSamples) {
  for (const double factor : {0.1, 0.5, 0.7, 1.5, 3.0}) {
    RobustMean mean;
    for (int i = 0; i < 50; ++i) mean.Add(10);
    EXPECT_EQ(mean.Add(10 * factor), Verdict::kAccepted);
    EXPECT_EQ(mean.Add(10 * factor), Verdict::kAccepted);
    EXPECT_EQ(mean.Add(10 * factor), Verdict::kChanged);
    EXPECT_DOUBLE_EQ(mean.value(), 10 * factor);
  }
}

TEST(RobustMeanTest, ASmallDriftUnderNoiseIsFollowed) {
  std::mt19937_64 rng(testing_support::TestSeed());
  std::normal_distribution<double> noise(0, 0.1);
  RobustMean mean;
  for (int i = 0; i < 200; ++i) mean.Add(10 * std::exp(noise(rng)));
  for (int i = 0; i < 40; ++i) mean.Add(8 * std::exp(noise(rng)));
  EXPECT_NEAR(mean.value(), 8, 0.8);
}

TEST(RobustMeanTest, AlternatingExtremesStayBetween) {
  RobustMean mean;
  for (int i = 0; i < 1000; ++i) mean.Add(i % 2 == 0 ? 1e-3 : 1e3);
  EXPECT_GE(mean.value(), 1e-3 * (1 - 1e-9));
  EXPECT_LE(mean.value(), 1e3 * (1 + 1e-9));
}

}  // namespace
}  // namespace writescope::controller
