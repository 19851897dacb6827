#include "engine/runtime/step_model.h"

#include <gtest/gtest.h>

#include <array>

namespace writescope::runtime {
namespace {

constexpr roofline::Rates kRates = {.cpu_alone = 12e9,
                                    .cpu_with_link = 10e9,
                                    .link_alone = 6e9,
                                    .link_with_cpu = 5e9,
                                    .device = 100e9};

StepModel::Options Options() {
  return {.rates = kRates, .handoff_seconds = 1e-4, .num_layers = 20, .ring_bytes = 1 << 30};
}

TEST(StepModel, PredictsByAllTermsOfTheRoofline) {
  StepModel model(Options());
  model.LearnDense(4, 0.010);
  // 60 MB could go ahead in D, so the CPU's half is all that is left, beside an idle link.
  const double cpu_half = 50e6 / 12e9;
  EXPECT_NEAR(model.PredictSeconds(4, {.spilled = 100'000'000}, 0.5), 0.010 + cpu_half + 1e-4,
              1e-9);
  // Without the CPU there is no hand-off, and 40 MB are left for a link that has it to itself.
  EXPECT_NEAR(model.PredictSeconds(4, {.spilled = 100'000'000}, 0), 0.010 + 40e6 / 6e9, 1e-9);
  // Resident bytes, when they take longer than both.
  EXPECT_NEAR(model.PredictSeconds(4, {.spilled = 100'000'000, .resident = 3'000'000'000}, 0.5),
              0.010 + 0.030 + 50e6 / 100e9 + 1e-4, 1e-9);
  // Rigid bytes keep the share in their interval: 80 MB are the CPU's at any share, or the link's,
  // which has 20 of them left when the CPU begins, and 10 when it has done its own.
  EXPECT_NEAR(model.PredictSeconds(4, {.spilled = 100'000'000, .host = 80'000'000}, 0.5),
              0.010 + 80e6 / 12e9 + 1e-4, 1e-9);
  EXPECT_NEAR(model.PredictSeconds(4, {.spilled = 100'000'000, .stream = 80'000'000}, 0.5),
              0.010 + 20e6 / 10e9 + 10e6 / 6e9 + 1e-4, 1e-9);
}

TEST(StepModel, ASmallRingLimitsHowFarTheLinkRunsAhead) {
  StepModel::Options options = Options();
  options.ring_bytes = 1'000'000;  // 20 MB over the layers, of the 60 MB that D has time for
  StepModel model(options);
  model.LearnDense(4, 0.010);
  EXPECT_NEAR(model.PredictSeconds(4, {.spilled = 100'000'000}, 0), 0.010 + 80e6 / 6e9, 1e-9);
}

TEST(StepModel, DenseTimeIsThatOfTheNearestBatch) {
  StepModel model(Options());
  EXPECT_EQ(model.DenseSeconds(1), 0);
  model.LearnDense(2, 0.020);
  EXPECT_EQ(model.DenseSeconds(1), 0.020);
  EXPECT_EQ(model.DenseSeconds(100), 0.020);
  model.LearnDense(16, 0.050);
  EXPECT_EQ(model.DenseSeconds(2), 0.020);
  EXPECT_EQ(model.DenseSeconds(5), 0.020);
  EXPECT_EQ(model.DenseSeconds(9), 0.050);
  // A range of sizes learns from every one of them, slowly.
  model.LearnDense(10, 0.100);
  EXPECT_GT(model.DenseSeconds(16), 0.050);
  EXPECT_LT(model.DenseSeconds(16), 0.070);
  for (int i = 0; i < 100; ++i) model.LearnDense(12, 0.030);
  EXPECT_NEAR(model.DenseSeconds(16), 0.030, 1e-6);
}

// As where the process was stopped for a while.
TEST(StepModel, OneInterruptedStepHardlyMovesTheDenseTime) {
  StepModel model(Options());
  for (int i = 0; i < 10; ++i) model.LearnDense(16, 0.010);
  model.LearnDense(16, 60);
  EXPECT_LE(model.DenseSeconds(16), 0.0121);
  // A machine that has become slower is followed all the same.
  for (int i = 0; i < 30; ++i) model.LearnDense(16, 0.1);
  EXPECT_GT(model.DenseSeconds(16), 0.09);
}

TEST(StepModel, DeviceAttentionIsMeasured) {
  StepModel model(Options());
  model.LearnDeviceAttention(100, 1);  // Too little to say anything
  const StepBytes bytes = {.spilled = 1'000'000, .resident = 1'000'000'000};
  EXPECT_NEAR(model.PredictSeconds(1, bytes, 1), 0.010 + 1e-4, 1e-9);
  model.LearnDeviceAttention(1'000'000'000, 0.020);
  EXPECT_NEAR(model.PredictSeconds(1, bytes, 1), 0.020 + 1e-4, 1e-9);
}

TEST(StepModel, TheTableIsTheRooflinesOwn) {
  StepModel::Options options = Options();
  options.host_kv_bytes = int64_t{100} << 30;
  StepModel model(options);
  model.LearnDense(1, 0.010);
  model.LearnDense(8, 0.040);
  const roofline::ShareTable table = *model.NewTable(0);
  ASSERT_TRUE(table.Validate().ok());
  ASSERT_EQ(table.buckets.size(), 2u);
  EXPECT_EQ(table.buckets[0].max_batch, 1u);
  EXPECT_EQ(table.buckets[1].max_batch, 8u);
  // What the link can stream in D leaves nothing to share: 60 MB, and 240 MB with eight.
  EXPECT_EQ(table.Lookup(1, 50'000'000), 0);
  EXPECT_GT(table.Lookup(1, 150'000'000), 0.2);
  EXPECT_EQ(table.Lookup(8, 200'000'000), 0);
  for (const double dense : {0.010, 0.040}) {
    const uint32_t batch = dense == 0.010 ? 1 : 8;
    for (const uint64_t spilled : {uint64_t{1} << 29, uint64_t{1} << 32, uint64_t{1} << 35}) {
      const double best = roofline::BestShare({.spilled_bytes = static_cast<double>(spilled),
                                               .dense_seconds = dense,
                                               .handoff_seconds = 1e-4},
                                              kRates)
                              .share;
      EXPECT_NEAR(table.Lookup(batch, spilled), best, 0.01) << batch << ", " << spilled;
    }
  }
}

TEST(StepModel, ANewTableComesWithAnotherDenseTimeAndAtMostOnceASecond) {
  StepModel::Options options = Options();
  options.host_kv_bytes = int64_t{100} << 30;
  StepModel model(options);
  const auto learn = [&](int batch_size, double seconds, int num_steps) {
    for (int step = 0; step < num_steps; ++step) model.LearnDense(batch_size, seconds);
  };
  learn(1, 0.010, 1);
  learn(16, 0.040, 1);
  ASSERT_TRUE(model.NewTable(100).has_value());
  EXPECT_FALSE(model.NewTable(200).has_value());
  learn(16, 0.037, 100);  // Less than a tenth is noise.
  EXPECT_FALSE(model.NewTable(200).has_value());
  learn(16, 0.020, 100);
  EXPECT_FALSE(model.NewTable(100.9).has_value());
  const auto table = model.NewTable(101);
  ASSERT_TRUE(table.has_value());
  EXPECT_EQ(table->buckets.size(), 2u);
  EXPECT_GT(table->Lookup(16, 200'000'000), 0.2);  // The link streams 120 MB in D, not 240.
  EXPECT_FALSE(model.NewTable(103).has_value());
  // Of another batch size, for which the table had D of the next larger one: not by its first
  // steps, which are recorded.
  learn(4, 0.012, 7);
  EXPECT_FALSE(model.NewTable(105).has_value());
  learn(4, 0.012, 1);
  ASSERT_TRUE(model.NewTable(105).has_value());
  // One that fits needs none.
  learn(8, 0.021, 100);
  EXPECT_FALSE(model.NewTable(110).has_value());
}

// As a worker comes to know it, by its own steps: D of a batch, and, where it is given, that of a
// part, when steps of either kind have taken what was predicted.
StepModel Known(int batch_size, double dense, double part_dense = 0) {
  StepModel model(Options());
  for (int step = 0; step < 20; ++step) {
    model.LearnDense(batch_size, dense);
    if (part_dense == 0) continue;
    for (const int micro_batches : {1, 2}) {
      model.LearnStep({.batch_size = batch_size,
                       .micro_batches = micro_batches,
                       .predicted_seconds = 0.040,
                       .seconds = 0.040,
                       .part_dense_seconds = part_dense});
    }
  }
  return model;
}

StepModel::TwoParts Plan(const StepModel& model, const std::array<StepModel::Part, 2>& parts) {
  const StepModel::Part whole = {
      .batch_size = parts[0].batch_size + parts[1].batch_size,
      .bytes = {.spilled = parts[0].bytes.spilled + parts[1].bytes.spilled,
                .resident = parts[0].bytes.resident + parts[1].bytes.resident}};
  const double share =
      roofline::BestShare({.spilled_bytes = static_cast<double>(whole.bytes.spilled),
                           .dense_seconds = model.DenseSeconds(whole.batch_size)},
                          kRates)
          .share;
  return model.PlanTwoParts(parts, whole, share);
}

TEST(StepModel, TwoPartsPayWhereTheyHideTheDenseWork) {
  const StepModel model = Known(16, 0.020, 0.016);
  // 40 ms of both sides together, and D of a part is half the time of the other's attention.
  const StepModel::Part half = {.batch_size = 8, .bytes = {.spilled = 300'000'000}};
  const StepModel::TwoParts two = Plan(model, {half, half});
  EXPECT_TRUE(two.pays);
  const double exposed = 2 * 0.016 / 20;
  EXPECT_NEAR(two.seconds, exposed + (600e6 - exposed * 6e9) / 15e9 + 1e-4, 1e-6);
  EXPECT_NEAR(two.cpu_share, 10.0 / 15 * (1 - exposed * 6e9 / 600e6), 1e-6);
}

TEST(StepModel, TwoPartsDoNotPayWhereDenseWorkIsAllOrNothing) {
  // Experts that both parts hit: a part takes as long as the whole, and there is little to hide it.
  const StepModel::Part small = {.batch_size = 8, .bytes = {.spilled = 100'000'000}};
  EXPECT_FALSE(Plan(Known(16, 0.020, 0.019), {small, small}).pays);
  // So much is spilled that D is nothing beside it.
  const StepModel::Part huge = {.batch_size = 8, .bytes = {.spilled = 50'000'000'000}};
  EXPECT_FALSE(Plan(Known(16, 0.012, 0.010), {huge, huge}).pays);
  // The device has attention enough to do itself.
  const StepModel::Part resident = {.batch_size = 8,
                                    .bytes = {.spilled = 300'000'000, .resident = 5'000'000'000}};
  EXPECT_FALSE(Plan(Known(16, 0.020, 0.016), {resident, resident}).pays);
}

TEST(StepModel, UnequalPartsHideLess) {
  const StepModel model = Known(2, 0.016, 0.015);
  const auto parts = [](int64_t first, int64_t second) {
    return std::array<StepModel::Part, 2>{
        StepModel::Part{.batch_size = 1, .bytes = {.spilled = first}},
        StepModel::Part{.batch_size = 1, .bytes = {.spilled = second}}};
  };
  const StepModel::TwoParts equal = Plan(model, parts(300'000'000, 300'000'000));
  const StepModel::TwoParts unequal = Plan(model, parts(590'000'000, 10'000'000));
  EXPECT_TRUE(equal.pays);
  EXPECT_GT(unequal.seconds, 1.2 * equal.seconds);
  EXPECT_FALSE(unequal.pays);
}

// What both parts read counts twice.
TEST(StepModel, ASharedBeginningMakesTwoPartsSlower) {
  const StepModel model = Known(16, 0.020, 0.016);
  const StepModel::Part half = {.batch_size = 8, .bytes = {.spilled = 500'000'000}};
  const StepModel::Part whole = {.batch_size = 16, .bytes = {.spilled = 600'000'000}};
  EXPECT_FALSE(model.PlanTwoParts({half, half}, whole, 0.5).pays);
}

// Steps at the start are slower than those to come: they are no reason.
TEST(StepModel, TwoPartsWaitForStepsOfTheWholeBatch) {
  StepModel model(Options());
  const StepModel::Part half = {.batch_size = 8, .bytes = {.spilled = 300'000'000}};
  EXPECT_FALSE(Plan(model, {half, half}).pays);
  model.LearnDense(8, 0.016);
  model.LearnDense(16, 0.020);
  EXPECT_FALSE(Plan(model, {half, half}).pays);
  for (int step = 0; step < 7; ++step) model.LearnDense(16, 0.020);
  EXPECT_TRUE(Plan(model, {half, half}).pays);
}

// What a worker knows of batches of a part's size is of its start, when nothing was recorded.
TEST(StepModel, TwoPartsAreTriedWhateverSmallBatchesTook) {
  StepModel model = Known(16, 0.020);
  for (int step = 0; step < 20; ++step) model.LearnDense(8, 0.030);
  const StepModel::Part half = {.batch_size = 8, .bytes = {.spilled = 300'000'000}};
  EXPECT_TRUE(Plan(model, {half, half}).pays);
  // But not where they could not pay at the best: little beside D, or D little beside the rest.
  const StepModel::Part small = {.batch_size = 8, .bytes = {.spilled = 60'000'000}};
  EXPECT_FALSE(Plan(model, {small, small}).pays);
  const StepModel::Part huge = {.batch_size = 8, .bytes = {.spilled = 50'000'000'000}};
  EXPECT_FALSE(Plan(model, {huge, huge}).pays);
}

class StepModelTrial : public ::testing::Test {
 protected:
  // Steps of what `behind` says of a prediction of 40 ms.
  void Learn(int num_steps, int micro_batches, double behind, double part_dense = 0.012) {
    for (int step = 0; step < num_steps; ++step) {
      model_.LearnStep({.batch_size = 16,
                        .micro_batches = micro_batches,
                        .predicted_seconds = 0.040,
                        .seconds = behind * 0.040,
                        .part_dense_seconds = part_dense});
    }
  }
  StepModel::TwoParts PlanHalves() const {
    const StepModel::Part half = {.batch_size = 8, .bytes = {.spilled = 120'000'000}};
    return Plan(model_, {half, half});
  }

  StepModel model_ = Known(16, 0.020);
};

TEST_F(StepModelTrial, GoesOnUntilStepsHaveToldAndDOfAPartIsThatOfTheirs) {
  ASSERT_TRUE(PlanHalves().pays);
  const double at_best = PlanHalves().seconds;
  Learn(10, 1, 1);
  Learn(2, 2, 5, 0.500);  // They are recorded, and say nothing.
  EXPECT_EQ(PlanHalves().seconds, at_best);
  // By what is known of a part now they would not pay, but steps in two have the last word.
  Learn(1, 2, 5, 0.0195);
  EXPECT_GT(PlanHalves().seconds, at_best);
  EXPECT_TRUE(PlanHalves().pays);
  Learn(4, 2, 0.6, 0.0195);
  EXPECT_TRUE(PlanHalves().pays);
  Learn(10, 2, 0.6, 0.0195);
  EXPECT_TRUE(PlanHalves().pays);
  Learn(20, 2, 1, 0.0195);
  EXPECT_FALSE(PlanHalves().pays);
}

// Both kinds of step may be behind their prediction: it is which is more so that counts.
TEST_F(StepModelTrial, TwoPartsThatTurnOutSlowerAreGivenUpAndTriedAgain) {
  Learn(20, 1, 1.3);
  // The first are slow, since they are recorded, and say nothing.
  Learn(3, 2, 5);
  Learn(20, 2, 1.3);
  EXPECT_TRUE(PlanHalves().pays);
  Learn(20, 2, 2.2);
  EXPECT_FALSE(PlanHalves().pays);
  // Of another range of batch sizes nothing is known.
  const StepModel::Part quarter = {.batch_size = 4, .bytes = {.spilled = 300'000'000}};
  for (int step = 0; step < 8; ++step) model_.LearnDense(8, 0.018);
  EXPECT_TRUE(Plan(model_, {quarter, quarter}).pays);
  int steps = 0;
  for (; steps < 1000 && !PlanHalves().pays; ++steps) Learn(1, 1, 1.3);
  EXPECT_GT(steps, 100);
  EXPECT_LT(steps, 1000);
  Learn(10, 2, 2.2);
  EXPECT_FALSE(PlanHalves().pays);
}

TEST_F(StepModelTrial, OneInterruptedStepOfTheWholeBatchDecidesNothing) {
  Learn(20, 1, 1.3);
  Learn(30, 2, 3);
  ASSERT_FALSE(PlanHalves().pays);
  Learn(1, 1, 1000);
  EXPECT_FALSE(PlanHalves().pays);
}

TEST_F(StepModelTrial, StepsOfTheWholeBatchAreTriedBesideThoseInTwo) {
  Learn(8, 2, 1);
  EXPECT_FALSE(PlanHalves().pays);
  Learn(8, 1, 1.1);
  EXPECT_TRUE(PlanHalves().pays);
}

// As a worker's steps come: those of the whole batch until its D is known, those in two until they
// have told, and one more of the whole batch.
TEST(StepModel, HasChosenWhenStepsOfEveryKindThatMayPayHaveTold) {
  for (const int64_t spilled : {300'000'000, 60'000'000}) {  // Two parts may pay, and may not.
    StepModel model(Options());
    EXPECT_FALSE(model.HasChosen(16));
    model.LearnDense(16, 0.020);
    const StepModel::Part half = {.batch_size = 8, .bytes = {.spilled = spilled}};
    int taken[3] = {};
    while (!model.HasChosen(16) && taken[1] + taken[2] < 100) {
      const int parts = Plan(model, {half, half}).pays ? 2 : 1;
      ++taken[parts];
      model.LearnStep({.batch_size = 16,
                       .micro_batches = parts,
                       .predicted_seconds = 0.040,
                       .seconds = 0.040,
                       .part_dense_seconds = 0.014});
      if (parts == 1) model.LearnDense(16, 0.020);
    }
    EXPECT_EQ(taken[1], 8) << spilled;
    EXPECT_EQ(taken[2], spilled == 300'000'000 ? 8 : 0);
    EXPECT_EQ(Plan(model, {half, half}).pays, taken[2] > 0);
    EXPECT_FALSE(model.HasChosen(64));
  }
}

TEST(StepModel, ATableBeforeAnyStepIsThatOfNoDenseTime) {
  StepModel model(Options());
  const roofline::ShareTable table = *model.NewTable(0);
  ASSERT_TRUE(table.Validate().ok());
  EXPECT_NEAR(table.Lookup(1, uint64_t{1} << 30), 10.0 / 15, 0.01);
}

}  // namespace
}  // namespace writescope::runtime
