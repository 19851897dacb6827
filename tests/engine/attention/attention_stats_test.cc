// What a step says of itself: bytes add up, and both sides are seen at work.
#include <gtest/gtest.h>

#include "engine/attention/cpu_reserve.h"
#include "engine/base/units.h"
#include "tests/support/attention_scenes.h"

namespace writescope::attention {
namespace {

using testing::AddBatch;
using testing::AttentionRig;
using testing::DecodeRequest;
using testing::StepOutput;
using testing::StepRequest;

testing::Shape SmallShape() { return testing::AllShapes()[0]; }

TEST(AttentionStats, BytesAddUpAtEveryShareAndInMeet) {
  AttentionRig rig(testing::RigOptions(SmallShape(), {"FourRegions", {4, 10, 16, 10}}));
  const std::vector<int> slots = AddBatch(rig, 256, {700, 500, 300}, 1);
  const int64_t block_bytes = rig.options().cache.geometry.block_bytes();
  const int64_t step_bytes = block_bytes * rig.options().cache.num_layers;
  for (int i = 0; i <= 21; ++i) {
    StepRequest request =
        DecodeRequest(slots, {.meet = i > 10, .cpu_share = i / 10.0, .handoff = i != 21});
    const StepOutput output = rig.Run(request);
    ASSERT_TRUE(output.status.ok()) << output.status;
    const AttentionStats& stats = output.stats;
    const RunList& runs = output.attention.runs;
    EXPECT_EQ(stats.spilled_bytes, runs.spilled_blocks() * step_bytes);
    EXPECT_EQ(stats.cpu_bytes + stats.link_bytes, stats.spilled_bytes);
    EXPECT_EQ(stats.resident_bytes, runs.device_blocks() * step_bytes);
    EXPECT_EQ(stats.stream_region_bytes, runs.stream.num_blocks() * step_bytes);
    EXPECT_EQ(stats.host_region_bytes, runs.host.num_blocks() * step_bytes);
    if (i <= 10) {
      const int64_t cut = CutForShare(runs, i / 10.0);
      EXPECT_EQ(stats.link_bytes, (runs.stream.num_blocks() + cut) * step_bytes);
      EXPECT_EQ(stats.mean_cut_blocks.front(), static_cast<double>(cut));
    } else if (i <= 20) {
      EXPECT_GE(stats.cpu_bytes, stats.host_region_bytes);
      EXPECT_GE(stats.link_bytes, stats.stream_region_bytes);
    } else {
      EXPECT_EQ(stats.cpu_bytes, 0);  // Without a hand-off host blocks are streamed too.
    }
    EXPECT_GT(stats.copies, 0);
    EXPECT_GE(stats.dense_s, 0);
    EXPECT_GE(stats.cpu_busy_s, 0);
    EXPECT_GT(stats.link_busy_s, 0);
    EXPECT_LE(stats.both_busy_s, stats.cpu_busy_s + 1e-9);
    EXPECT_LE(stats.both_busy_s, stats.link_busy_s + 1e-9);
    EXPECT_LE(stats.cpu_bytes_both_busy, stats.cpu_bytes);
    EXPECT_LE(stats.link_bytes_both_busy, stats.link_bytes);
  }
}

TEST(AttentionStats, ASharedPrefixCountsOnce) {
  AttentionRig rig(testing::RigOptions(SmallShape(), {"AllSwing", {0, 0, 40, 0}}));
  const std::vector<int> slots = AddBatch(rig, 256, {300, 300, 300}, 1);
  const StepOutput output = rig.Run(DecodeRequest(slots, {.cpu_share = 0.5, .handoff = true}));
  ASSERT_TRUE(output.status.ok());
  // Four shared units; the rest of each is in its open tail.
  EXPECT_EQ(output.stats.spilled_bytes,
            4 * rig.options().cache.geometry.block_bytes() * rig.options().cache.num_layers);
  EXPECT_EQ(output.stats.cpu_bytes, output.stats.spilled_bytes / 2);
}

TEST(AttentionStats, NothingSpilledMeansNobodyElseWorks) {
  AttentionRig rig(testing::RigOptions(SmallShape(), {"Resident", {20, 0, 0, 0}}));
  const std::vector<int> slots = AddBatch(rig, 0, {300, 200}, 1);
  const StepOutput output = rig.Run(DecodeRequest(slots, {.cpu_share = 0.5, .handoff = true}));
  ASSERT_TRUE(output.status.ok());
  EXPECT_EQ(output.stats.spilled_bytes, 0);
  EXPECT_EQ(output.stats.cpu_bytes + output.stats.link_bytes, 0);
  EXPECT_EQ(output.stats.copies, 0);
  EXPECT_EQ(output.stats.link_wait_s, 0);
  EXPECT_EQ(output.stats.cpu_busy_s, 0);
  EXPECT_GT(output.stats.resident_bytes, 0);
}

// With a paced link of which a step would need many milliseconds, meet lets both work.
TEST(AttentionStats, MeetSharesAndOverlaps) {
  testing::AttentionRigOptions options =
      testing::RigOptions(SmallShape(), {"AllSwing", {0, 0, 64, 0}});
  options.cache.link_bytes_per_s = 100e6;
  AttentionRig rig(options);
  const std::vector<int> slots = AddBatch(rig, 0, {2000, 2000}, 1);
  bool overlapped = false;
  for (int i = 0; i < 20 && !overlapped; ++i) {
    const StepOutput output = rig.Run(DecodeRequest(slots, {.meet = true, .handoff = true}));
    ASSERT_TRUE(output.status.ok());
    EXPECT_EQ(output.stats.cpu_bytes + output.stats.link_bytes, output.stats.spilled_bytes);
    overlapped = output.stats.cpu_bytes > 0 && output.stats.link_bytes > 0 &&
                 output.stats.both_busy_s > 0 && output.stats.link_bytes_both_busy > 0;
  }
  EXPECT_TRUE(overlapped);
}

// Of a slow link the last wave comes long after the CPU is done: it is left to that.
TEST(AttentionStats, TheLinkLearnsToLeaveTheLastToTheCpu) {
  testing::AttentionRigOptions options =
      testing::RigOptions(SmallShape(), {"AllSwing", {0, 0, 320, 0}});
  options.cache.link_bytes_per_s = 20e6;
  AttentionRig rig(options);
  const std::vector<int> slots = AddBatch(rig, 0, {9000, 9000}, 1);
  ASSERT_TRUE(rig.Run(DecodeRequest(slots, {.cpu_share = 0.5, .handoff = true})).status.ok());
  EXPECT_EQ(rig.hybrid().cpu_reserve_bytes(), 0);  // A planned step has no use for it.
  for (int i = 0; i < 20 && rig.hybrid().cpu_reserve_bytes() == 0; ++i) {
    ASSERT_TRUE(rig.Run(DecodeRequest(slots, {.meet = true, .handoff = true})).status.ok());
  }
  EXPECT_GT(rig.hybrid().cpu_reserve_bytes(), 0);
  for (int i = 0; i < 5; ++i) {
    const StepRequest request = DecodeRequest(slots, {.meet = true, .handoff = true});
    const StepOutput output = rig.Run(request);
    ASSERT_TRUE(output.status.ok());
    EXPECT_EQ(output.stats.cpu_bytes + output.stats.link_bytes, output.stats.spilled_bytes);
    EXPECT_LE(rig.Compare(output, rig.Plain(request)).ratio, 1);
    EXPECT_GT(output.stats.cpu_bytes, 0);
  }
}

TEST(CpuReserve, MovesByWhatWouldHaveBroughtTheEndsTogether) {
  CpuReserve reserve;
  reserve.Learn(100e-6, 1e-11, 3e-11);  // 100 GB/s and 33: 2.5 MB would do
  EXPECT_NEAR(reserve.bytes(), 1.25e6, 1);
  reserve.Learn(50e-6, 1e-11, 3e-11);
  EXPECT_NEAR(reserve.bytes(), 1.875e6, 1);
  reserve.Learn(-20e-6, 1e-11, 3e-11);
  EXPECT_NEAR(reserve.bytes(), 1.625e6, 1);
  reserve.Learn(-1, 1e-11, 3e-11);
  EXPECT_EQ(reserve.bytes(), 0);
  reserve.Learn(1, 0, 0);
  EXPECT_EQ(reserve.bytes(), 0);
  reserve.Learn(1e9, 1e-11, 3e-11);
  EXPECT_EQ(reserve.bytes(), CpuReserve::kMaxBytes);
}

// A link of which a step needs many milliseconds, and nothing else to attend to. That is no dense
// work, though the CPU has no query: the engine's own shares go by the dense time of such steps
// too.
TEST(AttentionStats, TheDeviceWaitsForASlowLink) {
  testing::AttentionRigOptions options =
      testing::RigOptions(SmallShape(), {"AllSwing", {0, 0, 64, 0}});
  options.cache.link_bytes_per_s = 20e6;
  AttentionRig rig(options);
  const std::vector<int> slots = AddBatch(rig, 0, {2000, 2000}, 1);
  const StepOutput output = rig.Run(DecodeRequest(slots, {}));
  ASSERT_TRUE(output.status.ok());
  EXPECT_GT(output.stats.link_wait_s, 0.1 * output.stats.link_busy_s);
  EXPECT_LT(output.stats.dense_s, 0.5 * output.stats.link_wait_s);
}

// Halving the link's pace moves the meeting point towards the CPU.
TEST(AttentionStats, MeetFollowsTheLinksPace) {
  testing::AttentionRigOptions options =
      testing::RigOptions(SmallShape(), {"AllSwing", {0, 0, 64, 0}});
  AttentionRig rig(options);
  const std::vector<int> slots = AddBatch(rig, 0, {2000, 2000}, 1);
  const auto mean_cpu_share = [&](double pace) {
    EXPECT_TRUE(rig.cache().device().SetLinkPace(pace).ok());
    double share = 0;
    for (int i = 0; i < 10; ++i) {
      const StepOutput output = rig.Run(DecodeRequest(slots, {.meet = true, .handoff = true}));
      EXPECT_TRUE(output.status.ok());
      share += static_cast<double>(output.stats.cpu_bytes) /
               static_cast<double>(output.stats.spilled_bytes) / 10;
    }
    return share;
  };
  // A busy machine may give the fast link's thread as little as the slow link allows; not always.
  bool follows = false;
  for (int i = 0; i < 5 && !follows; ++i) follows = mean_cpu_share(20e6) > mean_cpu_share(4e9);
  EXPECT_TRUE(follows);
}

}  // namespace
}  // namespace writescope::attention
