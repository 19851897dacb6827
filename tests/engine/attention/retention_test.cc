// Copies that are kept on the device while it has room: a streamed block is not streamed again.
#include <gtest/gtest.h>

#include "tests/support/attention_scenes.h"

namespace writescope::attention {
namespace {

using kvcache::RegionKind;
using testing::AddBatch;
using testing::AttentionRig;
using testing::DecodeRequest;
using testing::StepOutput;
using testing::StepRequest;

class RetentionTest : public ::testing::TestWithParam<testing::Shape> {
 protected:
  // The device region is free since its first tenant has gone: without a prefix cache, which would
  // keep that one's blocks.
  static testing::AttentionRigOptions Options(
      const std::array<int64_t, kvcache::kNumRegions>& blocks) {
    testing::AttentionRigOptions options = testing::RigOptions(GetParam(), {"", blocks});
    options.cache.prefix_cache = false;
    options.wait_limit = absl::Seconds(2);
    return options;
  }
  RetentionTest() : rig_(Options({12, 6, 20, 6})) {
    const std::vector<int> first = AddBatch(rig_, 0, {12 * 64}, 5);
    slots_ = AddBatch(rig_, 128, {900, 700}, 6);
    rig_.cache().Remove(first[0]);
  }
  StepOutput Step(int64_t keep_free, const SharePlan& share) {
    StepRequest request = DecodeRequest(slots_, share);
    request.retain_keep_free = keep_free;
    request.keep = true;
    const std::vector<testing::PlainOutput> plain = rig_.Plain(request);
    StepOutput output = rig_.Run(request);
    EXPECT_TRUE(output.status.ok()) << output.status;
    const AttentionRig::Worst worst = rig_.Compare(output, plain);
    EXPECT_LE(worst.ratio, 1) << worst.where;
    return output;
  }
  int64_t Retained() { return rig_.cache().blocks().Usage()[0].retained; }

  AttentionRig rig_;
  std::vector<int> slots_;
};

TEST_P(RetentionTest, KeepsCopiesAndThenReadsThemOnTheDevice) {
  const SharePlan share = {.cpu_share = 0.5, .handoff = true};
  const StepOutput before = Step(/*keep_free=*/-1, share);
  EXPECT_EQ(Retained(), 0);
  const StepOutput first = Step(/*keep_free=*/2, share);
  const int64_t retained = Retained();
  EXPECT_GT(retained, 3);
  EXPECT_GE(rig_.cache().blocks().region(RegionKind::kDevice).free_blocks(), 2);
  EXPECT_EQ(first.stats.spilled_bytes, before.stats.spilled_bytes);
  const StepOutput second = Step(/*keep_free=*/2, share);
  const int64_t step_bytes =
      rig_.options().cache.geometry.block_bytes() * rig_.options().cache.num_layers;
  EXPECT_EQ(second.stats.spilled_bytes, first.stats.spilled_bytes - retained * step_bytes);
  EXPECT_EQ(second.stats.resident_bytes, first.stats.resident_bytes + retained * step_bytes);
  // Homes are as they were; no copy counts as a move.
  EXPECT_EQ(rig_.cache().blocks().moved_bytes(), 0);
  for (const int slot : slots_) {
    EXPECT_EQ(rig_.cache().CheckContents(slot), "");
    for (const int id : rig_.cache().cache().SealedBlocks(slot)) {
      EXPECT_TRUE(rig_.cache().blocks().Verify(id).ok());
    }
  }
}

TEST_P(RetentionTest, CopiesGoWhenTheirRoomIsNeeded) {
  Step(/*keep_free=*/0, {.meet = true, .handoff = true});
  EXPECT_GT(Retained(), 5);
  const int64_t available = rig_.cache().AvailableBlocks();
  const int newcomer = rig_.cache().Add(12);
  ASSERT_TRUE(rig_.cache().Append(newcomer, testing::RandomTokens(9, 400)).ok());
  EXPECT_GT(rig_.cache().cache().DeviceTokens(newcomer), 0);
  EXPECT_EQ(rig_.cache().AvailableBlocks(), available - 6);
  EXPECT_EQ(rig_.cache().CheckContents(newcomer), "");
  Step(/*keep_free=*/-1, {.cpu_share = 0.3, .handoff = true});
  rig_.cache().Remove(newcomer);
  Step(/*keep_free=*/-1, {.cpu_share = 0.3, .handoff = true});
  EXPECT_EQ(rig_.cache().CheckLedger(), "");
}

TEST_P(RetentionTest, CopiesOfAFailedOrAbandonedStepAreNotRead) {
  StepRequest request = DecodeRequest(slots_, {.cpu_share = 0.5, .handoff = true});
  request.retain_keep_free = 0;
  rig_.hybrid().SetClaimHook([](Side side, int turn) { return side == Side::kCpu || turn == 0; });
  const StepOutput failed = rig_.Run(request);
  EXPECT_FALSE(failed.status.ok());
  EXPECT_EQ(Retained(), 0);
  rig_.hybrid().SetClaimHook(nullptr);
  EXPECT_TRUE(rig_.hybrid().Ok());
  Step(/*keep_free=*/0, {.cpu_share = 0.5, .handoff = true});
  EXPECT_GT(Retained(), 0);
  Step(/*keep_free=*/0, {.cpu_share = 0.5, .handoff = true});
}

TEST_P(RetentionTest, EverythingIsResidentInTheEnd) {
  AttentionRig rig(Options({16, 0, 16, 0}));
  const std::vector<int> first = AddBatch(rig, 0, {16 * 64}, 5);
  const std::vector<int> slots = AddBatch(rig, 0, {600}, 6);
  rig.cache().Remove(first[0]);
  for (int step = 0; step < 2; ++step) {
    StepRequest request = DecodeRequest(slots, {.cpu_share = 0, .handoff = true});
    request.retain_keep_free = 0;
    const std::vector<testing::PlainOutput> plain = rig.Plain(request);
    const StepOutput output = rig.Run(request);
    ASSERT_TRUE(output.status.ok());
    EXPECT_LE(rig.Compare(output, plain).ratio, 1);
    EXPECT_EQ(output.stats.spilled_bytes == 0, step == 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, RetentionTest,
                         ::testing::Values(testing::AllShapes()[0], testing::AllShapes()[5]),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace writescope::attention
