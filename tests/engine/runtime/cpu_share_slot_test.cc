#include "engine/runtime/cpu_share_slot.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace writescope::runtime {
namespace {

class CpuShareSlotTest : public ::testing::Test {
 protected:
  ShareUpdate Update(double share, int64_t generation, std::string controller = "a") {
    return {
        .controller_id = std::move(controller),
        .generation = generation,
        // By hand: ConstantTable would put a share right.
        .table = {.buckets = {{.max_batch = 1, .points = {{.spilled_bytes = 1, .share = share}}}}},
        .valid_for = absl::Seconds(10)};
  }
  double Share() {
    int64_t generation;
    return slot_.Lookup(4, 1 << 30, &generation);
  }
  FakeClock clock_;
  CpuShareSlot slot_{roofline::ConstantTable(0.4), {.min_share = 0.2, .max_share = 0.8}, clock_};
};

TEST_F(CpuShareSlotTest, StartsWithTheEnginesOwnTableAndReturnsToItWhenTheLeaseEnds) {
  EXPECT_EQ(Share(), 0.4);
  ASSERT_EQ(slot_.Offer(Update(0.6, 1))->outcome, ShareOutcome::kApplied);
  EXPECT_EQ(Share(), 0.6);
  EXPECT_EQ(slot_.State().controller_id, "a");
  clock_.Advance(absl::Seconds(9));
  EXPECT_EQ(Share(), 0.6);
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(Share(), 0.4);
  EXPECT_EQ(slot_.State().controller_id, "");
  EXPECT_EQ(slot_.State().generation, 1);
}

TEST_F(CpuShareSlotTest, AnOldGenerationNeverBeatsANewOne) {
  ASSERT_TRUE(slot_.Offer(Update(0.6, 7)).ok());
  for (const int64_t generation : {1, 6, 7}) {
    const auto reply = slot_.Offer(Update(0.3, generation));
    ASSERT_TRUE(reply.ok());
    EXPECT_EQ(reply->outcome, ShareOutcome::kStale);
    EXPECT_EQ(reply->in_force.generation, 7);
    EXPECT_EQ(Share(), 0.6);
  }
  // Also after the lease: a message may have been on its way for long.
  clock_.Advance(absl::Hours(1));
  EXPECT_EQ(slot_.Offer(Update(0.3, 7))->outcome, ShareOutcome::kStale);
  EXPECT_EQ(slot_.Offer(Update(0.3, 8))->outcome, ShareOutcome::kApplied);
}

TEST_F(CpuShareSlotTest, NoGenerationLocksTheOthersOut) {
  ASSERT_TRUE(slot_.Offer(Update(0.6, 7)).ok());
  const auto reply = slot_.Offer(Update(0.3, std::numeric_limits<int64_t>::max()));
  EXPECT_TRUE(absl::IsInvalidArgument(reply.status())) << reply.status();
  EXPECT_EQ(Share(), 0.6);
  EXPECT_EQ(slot_.Offer(Update(0.5, 7 + (int64_t{1} << 61)))->outcome, ShareOutcome::kApplied);
  EXPECT_EQ(slot_.Offer(Update(0.4, 8 + (int64_t{1} << 61)))->outcome, ShareOutcome::kApplied);
}

TEST_F(CpuShareSlotTest, AnotherControllerHasToWaitForTheLease) {
  ASSERT_TRUE(slot_.Offer(Update(0.6, 1, "a")).ok());
  EXPECT_EQ(slot_.Offer(Update(0.3, 2, "b"))->outcome, ShareOutcome::kStale);
  EXPECT_EQ(slot_.Offer(Update(0.5, 3, "a"))->outcome, ShareOutcome::kApplied);
  clock_.Advance(absl::Seconds(11));
  EXPECT_EQ(slot_.Offer(Update(0.3, 4, "b"))->outcome, ShareOutcome::kApplied);
  EXPECT_EQ(slot_.Offer(Update(0.5, 5, "a"))->outcome, ShareOutcome::kStale);
}

TEST_F(CpuShareSlotTest, AnOperatorGoesBeforeControllers) {
  ASSERT_TRUE(slot_.Offer(Update(0.6, 1, "a")).ok());
  EXPECT_EQ(slot_.Offer(Update(0.3, 2, "operator:me"))->outcome, ShareOutcome::kApplied);
  EXPECT_EQ(slot_.Offer(Update(0.6, 3, "a"))->outcome, ShareOutcome::kStale);
  EXPECT_EQ(Share(), 0.3);
}

TEST_F(CpuShareSlotTest, SharesThatThePlacementForbidsAreClampedAndSaidSo) {
  const auto reply = slot_.Offer(Update(1, 1));
  EXPECT_EQ(reply->outcome, ShareOutcome::kClamped);
  EXPECT_EQ(Share(), 0.8);
  EXPECT_EQ(slot_.Offer(Update(0, 2))->outcome, ShareOutcome::kClamped);
  EXPECT_EQ(Share(), 0.2);
}

TEST_F(CpuShareSlotTest, WhatMakesNoSenseIsRefusedAndChangesNothing) {
  ASSERT_TRUE(slot_.Offer(Update(0.6, 1)).ok());
  const double inf = std::numeric_limits<double>::infinity();
  for (const double share : {double{NAN}, -0.1, 1.1, 2.0, inf, -inf}) {
    EXPECT_EQ(slot_.Offer(Update(share, 9)).status().code(), absl::StatusCode::kInvalidArgument)
        << share;
  }
  for (const absl::Duration lease :
       {absl::ZeroDuration(), -absl::Seconds(1), absl::InfiniteDuration()}) {
    ShareUpdate update = Update(0.5, 9);
    update.valid_for = lease;
    EXPECT_FALSE(slot_.Offer(update).ok());
  }
  EXPECT_FALSE(slot_.Offer(Update(0.5, 0)).ok());
  EXPECT_FALSE(slot_.Offer(Update(0.5, -3)).ok());
  ShareUpdate empty = Update(0.5, 9);
  empty.table.buckets.clear();
  EXPECT_FALSE(slot_.Offer(empty).ok());
  EXPECT_EQ(Share(), 0.6);
  EXPECT_EQ(slot_.State().generation, 1);
}

}  // namespace
}  // namespace writescope::runtime
