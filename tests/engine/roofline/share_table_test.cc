#include "engine/roofline/share_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace writescope::roofline {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

ShareTable TwoBuckets() {
  return {{{8, {{kGiB, 0.2}, {2 * kGiB, 0.4}, {8 * kGiB, 0.7}}}, {64, {{4 * kGiB, 0.1}}}}};
}

TEST(ShareTableTest, LookupIsLinearInTheInverse) {
  const ShareTable table = TwoBuckets();
  EXPECT_DOUBLE_EQ(table.Lookup(1, kGiB), 0.2);
  EXPECT_DOUBLE_EQ(table.Lookup(8, 2 * kGiB), 0.4);
  // 1/S half way between 1/1 and 1/2 is S = 4/3.
  EXPECT_NEAR(table.Lookup(8, kGiB * 4 / 3), 0.3, 1e-9);
  // Half way between 1/2 and 1/8 is S = 3.2; linear in S would give 0.46.
  EXPECT_NEAR(table.Lookup(8, kGiB * 16 / 5), 0.55, 1e-9);
}

TEST(ShareTableTest, ConstantOutsideAndForLargeBatches) {
  const ShareTable table = TwoBuckets();
  EXPECT_DOUBLE_EQ(table.Lookup(8, 0), 0.2);
  EXPECT_DOUBLE_EQ(table.Lookup(8, 1), 0.2);
  EXPECT_DOUBLE_EQ(table.Lookup(8, std::numeric_limits<uint64_t>::max()), 0.7);
  EXPECT_DOUBLE_EQ(table.Lookup(9, kGiB), 0.1);
  EXPECT_DOUBLE_EQ(table.Lookup(100000, kGiB), 0.1);
  EXPECT_DOUBLE_EQ(table.Lookup(0, kGiB), 0.2);
  EXPECT_DOUBLE_EQ(ShareTable{}.Lookup(1, kGiB), 0);
}

TEST(ShareTableTest, ReproducesTheRooflineWithTwoPoints) {
  // The unclamped curve is exactly linear in 1/S, so that few points suffice.
  TableSpec spec;
  spec.rates = {115e9, 94e9, 53e9, 42e9, 0};
  spec.batches = {{16, 0.01, 0}};
  spec.min_spilled_bytes = kGiB;
  spec.max_spilled_bytes = 128 * kGiB;
  const ShareTable table = BuildShareTable(spec);
  ASSERT_EQ(table.buckets.size(), 1u);
  EXPECT_EQ(table.buckets[0].points.size(), 2u);
  StepLoad load;
  load.spilled_bytes = 20.0 * kGiB;
  load.dense_seconds = 0.01;
  EXPECT_NEAR(table.Lookup(16, 20 * kGiB), BestShare(load, spec.rates).share, 1e-9);
}

TEST(ShareTableTest, SamplesTheBendAndTheHandoffJump) {
  TableSpec spec;
  spec.rates = {115e9, 94e9, 53e9, 42e9, 0};
  spec.batches = {{1, 0.01, 0}};
  spec.handoff_seconds = 0.002;  // Worth it only some way above the bend at 0.53 GB.
  const ShareTable table = BuildShareTable(spec);
  ASSERT_TRUE(table.Validate().ok());
  EXPECT_EQ(table.Lookup(1, 530000000), 0);
  for (double spilled = 1e8; spilled < 1e11; spilled *= 1.07) {
    StepLoad load;
    load.spilled_bytes = spilled;
    load.dense_seconds = 0.01;
    load.handoff_seconds = 0.002;
    const double share = table.Lookup(1, static_cast<uint64_t>(spilled));
    EXPECT_LE(PredictStep(load, spec.rates, share), BestShare(load, spec.rates).step_seconds * 1.03)
        << spilled;
    EXPECT_LE(PredictStep(load, spec.rates, share), PredictStep(load, spec.rates, 0) * 1.03);
  }
}

TEST(ShareTableTest, ValidateNamesThePlaceAndTheNumber) {
  EXPECT_TRUE(TwoBuckets().Validate().ok());
  EXPECT_TRUE(ConstantTable(0.5).Validate().ok());

  const auto message = [](const ShareTable& table) {
    EXPECT_EQ(table.Validate().code(), absl::StatusCode::kInvalidArgument);
    return std::string(table.Validate().message());
  };
  EXPECT_THAT(message({}), HasSubstr("no buckets"));
  EXPECT_THAT(message({{{4, {}}}}), HasSubstr("bucket 0 has no points"));
  EXPECT_THAT(message({{{0, {{1, 0.5}}}}}), HasSubstr("max_batch is 0"));
  ShareTable table = TwoBuckets();
  table.buckets[0].points[2].share = kNan;
  EXPECT_THAT(message(table), HasSubstr("bucket 0 point 2: share nan"));
  table.buckets[0].points[2].share = -0.25;
  EXPECT_THAT(message(table), HasSubstr("share -0.25"));
  table.buckets[0].points[2].share = 40;
  EXPECT_THAT(message(table), HasSubstr("share 40"));
  table = TwoBuckets();
  table.buckets[0].points[1].spilled_bytes = kGiB;
  EXPECT_THAT(message(table), HasSubstr("spilled_bytes 1073741824 is not above 1073741824"));
  table = TwoBuckets();
  table.buckets[0].points[0].spilled_bytes = 0;
  EXPECT_THAT(message(table), HasSubstr("spilled_bytes is 0"));
  table = TwoBuckets();
  table.buckets[1].max_batch = 8;
  EXPECT_THAT(message(table), HasSubstr("max_batch 8 is not above 8"));
  table = TwoBuckets();
  table.buckets[1].points.clear();
  for (uint64_t i = 1; i <= ShareTable::kMaxPoints + 1; ++i) {
    table.buckets[1].points.push_back({i, 0.5});
  }
  EXPECT_THAT(message(table), HasSubstr("has 257 points"));
  table.buckets.clear();
  for (uint32_t i = 1; i <= ShareTable::kMaxBuckets + 1; ++i) {
    table.buckets.push_back({i, {{1, 0.5}}});
  }
  EXPECT_THAT(message(table), HasSubstr("has 65 buckets"));
}

TEST(ShareTableTest, ClampCountsWhatItMoves) {
  ShareTable table = TwoBuckets();
  EXPECT_EQ(ClampTable(table, {0, 1}), 0);
  EXPECT_EQ(table, TwoBuckets());
  EXPECT_EQ(ClampTable(table, {0.3, 0.6}), 3);
  EXPECT_DOUBLE_EQ(table.Lookup(8, kGiB), 0.3);
  EXPECT_DOUBLE_EQ(table.Lookup(8, 2 * kGiB), 0.4);
  EXPECT_DOUBLE_EQ(table.Lookup(8, 8 * kGiB), 0.6);
  EXPECT_DOUBLE_EQ(table.Lookup(64, kGiB), 0.3);
  // A contradictory interval keeps its lower end: what only the CPU can read has to be read.
  table = TwoBuckets();
  ClampTable(table, {0.8, 0.5});
  EXPECT_DOUBLE_EQ(table.Lookup(8, kGiB), 0.8);
}

TEST(ShareTableTest, MaxDifferenceLooksAtTheCurves) {
  const ShareTable table = TwoBuckets();
  EXPECT_EQ(MaxDifference(table, table), 0);
  ShareTable more_points = table;
  const uint64_t between = kGiB * 3 / 2;
  more_points.buckets[0].points.insert(more_points.buckets[0].points.begin() + 1,
                                       {between, table.Lookup(8, between)});
  EXPECT_NEAR(MaxDifference(table, more_points), 0, 1e-12);
  more_points.buckets[0].points[1].share += 0.07;
  EXPECT_NEAR(MaxDifference(table, more_points), 0.07, 1e-9);
  EXPECT_NEAR(MaxDifference(table, {}), 0.7, 1e-12);
}

TEST(ShareTableTest, ConstantTableForAnyNumber) {
  EXPECT_EQ(ConstantTable(kNan).Lookup(3, 7), 0);
  EXPECT_EQ(ConstantTable(2).Lookup(3, 7), 1);
  EXPECT_EQ(ConstantTable(0.25).Lookup(1000, kGiB), 0.25);
}

TEST(ShareTableTest, BuildSurvivesOddSpecs) {
  TableSpec spec;
  spec.batches = {{0, kNan, -1}, {0, 1, 1}};
  spec.min_spilled_bytes = std::numeric_limits<uint64_t>::max();
  spec.max_spilled_bytes = 0;
  spec.tolerance = kNan;
  spec.max_points = -5;
  EXPECT_TRUE(BuildShareTable(spec).Validate().ok()) << BuildShareTable(spec).Validate();
}

}  // namespace
}  // namespace writescope::roofline
