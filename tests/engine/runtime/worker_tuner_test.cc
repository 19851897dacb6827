#include "engine/runtime/worker_tuner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

namespace writescope::runtime {
namespace {

class WorkerTunerTest : public ::testing::Test {
 protected:
  // Steps whose cost is that of their number of workers, give or take some per cent.
  void Take(WorkerTuner& tuner, int num_steps, const std::function<double(int)>& cost,
            double noise = 0.03) {
    for (int i = 0; i < num_steps; ++i) {
      const int workers = tuner.num_workers();
      EXPECT_GE(workers, 1);
      EXPECT_LE(workers, 14);
      tuner.Learn({.batch_size = 20, .cost = cost(workers) * std::exp(noise * normal_(rng_))});
    }
  }

  std::mt19937 rng_{7};
  std::normal_distribution<double> normal_;
};

// As many workers as have a core of their own; each more delays all of them.
double Beside(int busy_cores, int workers) {
  const double free = 16 - busy_cores;
  return 14.0 / std::min<double>(workers, free) *
         (workers > free ? 1 + 0.06 * (workers - free) : 1);
}

TEST_F(WorkerTunerTest, BeginsWithAllAndStaysWhereMoreIsBetter) {
  WorkerTuner tuner(14);
  EXPECT_EQ(tuner.num_workers(), 14);
  Take(tuner, 5000, [](int workers) { return 14.0 / workers; });
  EXPECT_EQ(tuner.best(), 14);
}

TEST_F(WorkerTunerTest, FindsHowManyAreBestBesideOtherProgramsAndGoesUpWhenTheyAreGone) {
  for (const int busy : {3, 8, 11}) {
    WorkerTuner tuner(14);
    Take(tuner, 600, [&](int workers) { return Beside(busy, workers); });
    EXPECT_NEAR(tuner.best(), 16 - busy, 2) << busy << " busy cores";
    Take(tuner, 4000, [&](int workers) { return Beside(busy, workers); });
    EXPECT_NEAR(tuner.best(), 16 - busy, 1) << busy << " busy cores";
    Take(tuner, 6000, [](int workers) { return Beside(0, workers); });
    EXPECT_GE(tuner.best(), 13) << busy << " busy cores are free again";
  }
}

TEST_F(WorkerTunerTest, WhatIsClearShowsInFewSteps) {
  WorkerTuner tuner(14);
  Take(tuner, 80, [](int workers) { return Beside(8, workers); });
  EXPECT_LE(tuner.best(), 9);
}

TEST_F(WorkerTunerTest, TrialsGetRareAndCostLittle) {
  WorkerTuner tuner(14);
  const auto cost = [](int workers) { return 14.0 / workers; };
  Take(tuner, 3000, cost);
  int tried = 0;
  for (int step = 0; step < 10'000; ++step) {
    tried += tuner.num_workers() != tuner.best();
    Take(tuner, 1, cost);
  }
  EXPECT_GT(tried, 0);
  EXPECT_LT(tried, 200);
}

TEST_F(WorkerTunerTest, WhatDriftsAndWhatIsLateDecidesNothing) {
  WorkerTuner tuner(14);
  double drift = 1;
  int step = 0;
  Take(tuner, 2000, [&](int workers) {
    drift *= 0.999;
    return (++step % 97 == 0 ? 20 : 1) * drift * (1 + 0.05 * (14 - workers));
  });
  EXPECT_EQ(tuner.best(), 14);
}

// Steps in two micro-batches may take half of what was predicted, whoever attends.
TEST_F(WorkerTunerTest, OnlyStepsOfAKindAreCompared) {
  WorkerTuner tuner(14);
  std::bernoulli_distribution changes(0.1);
  int micro_batches = 1;
  for (int step = 0; step < 20'000; ++step) {
    // It changes just where the candidate begins.
    const bool is_candidate = tuner.num_workers() != tuner.best();
    if (changes(rng_) || is_candidate) micro_batches = is_candidate ? 2 : 1;
    const double cost = (micro_batches == 2 ? 0.5 : 1) * (1 + 0.04 * (14 - tuner.num_workers()));
    tuner.Learn({.batch_size = 20, .micro_batches = micro_batches, .cost = cost});
    ASSERT_EQ(tuner.best(), 14) << "step " << step;
  }
}

TEST_F(WorkerTunerTest, OneWorkerIsLeftAlone) {
  for (const int most : {0, 1}) {
    WorkerTuner tuner(most);
    Take(tuner, 500, [](int) { return 1; });
    EXPECT_EQ(tuner.best(), 1);
  }
  WorkerTuner two(2);
  Take(two, 500, [](int workers) { return workers; });
  EXPECT_EQ(two.best(), 1);
}

// The first steps of a kind are slow: they are recorded.
TEST_F(WorkerTunerTest, FirstStepsOfAKindSayNothing) {
  WorkerTuner tuner(14);
  for (int step = 0; step < 20'000; ++step) {
    const double cost = step % 8 == 0 ? 3 : 1 + 0.01 * (14 - tuner.num_workers());
    tuner.Learn({.batch_size = 10 + step / 8 % 2, .cost = cost});
    ASSERT_EQ(tuner.best(), 14) << "step " << step;
  }
}

}  // namespace
}  // namespace writescope::runtime
