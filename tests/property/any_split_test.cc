// Any split equals no split: whatever part of a step's attention each processor takes, and wherever
// the bytes lie, the answer is the plain one.
#include <gtest/gtest.h>

#include <tuple>

#include "tests/support/attention_scenes.h"
#include "tests/support/seed.h"

namespace writescope {
namespace {

using attention::SharePlan;
using testing::AddBatch;
using testing::AttentionRig;
using testing::DecodeRequest;
using testing::Mix;
using testing::PlacementCase;
using testing::Shape;
using testing::StepOutput;
using testing::StepRequest;
using testing_support::TestSeed;

// Over a unit border or two for each sequence; the plain answer takes long under the sanitizer.
#if defined(__SANITIZE_THREAD__)
constexpr int kSteps = 70;
#else
constexpr int kSteps = 140;
#endif

class AnySplitTest : public ::testing::TestWithParam<std::tuple<Shape, PlacementCase>> {
 protected:
  AnySplitTest() : rig_(testing::RigOptions(shape(), std::get<1>(GetParam()))) {
    rig_.SetQueries(testing::RandomQueries(TestSeed(), rig_.k_dim(), 1.0));
    rig_.SetKv(testing::RandomKv(TestSeed()));
  }
  static const Shape& shape() { return std::get<0>(GetParam()); }

  void ExpectPlain(const StepOutput& output, const std::vector<testing::PlainOutput>& plain) {
    ASSERT_TRUE(output.status.ok()) << output.status;
    const AttentionRig::Worst worst = rig_.Compare(output, plain);
    ASSERT_LE(worst.ratio, 1) << worst.where;
  }
  // Nothing that the steps did has changed a byte that it should not have.
  void ExpectCacheIntact(const std::vector<int>& slots) {
    for (const int slot : slots) ASSERT_EQ(rig_.cache().CheckContents(slot), "");
    EXPECT_EQ(rig_.cache().blocks().moved_bytes(), 0);
    EXPECT_EQ(rig_.cache().CheckLedger(), "");
  }

  AttentionRig rig_;
};

TEST_P(AnySplitTest, EveryCutAndMeet) {
  const std::vector<int> slots = AddBatch(rig_, 256, {386, 333, 300}, TestSeed());
  const StepRequest request = DecodeRequest(slots, {.handoff = true});
  const std::vector<testing::PlainOutput> plain = rig_.Plain(request);
  int64_t swing_blocks = 0;
  for (int64_t cut = 0; cut <= swing_blocks; ++cut) {
    StepRequest at_cut = request;
    at_cut.plant = [&](attention::StepAttention& step) {
      swing_blocks = step.runs.swing.num_blocks();
    };
    if (cut == 0) ExpectPlain(rig_.Run(at_cut), plain);
    attention::RunList runs = rig_.Run(at_cut).attention.runs;
    at_cut.share.cpu_share = testing::ShareForCut(runs, cut);
    SCOPED_TRACE("cut " + std::to_string(cut) + " of " + std::to_string(swing_blocks));
    const StepOutput output = rig_.Run(at_cut);
    ExpectPlain(output, plain);
    if (HasFatalFailure()) return;
    if (runs.spilled_blocks() > 0) {
      EXPECT_EQ(output.stats.mean_cut_blocks.front(), static_cast<double>(cut));
    }
  }
  for (int i = 0; i < 20; ++i) {
    StepRequest meet = request;
    meet.share = {.meet = true, .handoff = true};
    ExpectPlain(rig_.Run(meet), plain);
    if (HasFatalFailure()) return;
  }
  StepRequest device_only = request;
  device_only.share = {.handoff = false};
  ExpectPlain(rig_.Run(device_only), plain);
  ExpectCacheIntact(slots);
}

// Sequences grow over unit borders while the share changes at every step, so open tails, commits
// under way and fresh homes all take part.
TEST_P(AnySplitTest, ShareChangedAtEveryStep) {
  std::vector<int> slots = AddBatch(rig_, 128, {190, 250, 129}, TestSeed());
  uint64_t random = TestSeed();
  for (int step = 0; step < kSteps; ++step) {
    random = Mix(random, 9);
    const SharePlan share = {.meet = random % 3 == 0,
                             .cpu_share = static_cast<double>(random / 3 % 11) / 10,
                             .handoff = random / 64 % 4 != 0};
    StepRequest request = DecodeRequest(slots, share);
    request.keep = true;
    const std::vector<testing::PlainOutput> plain = rig_.Plain(request);
    SCOPED_TRACE("step " + std::to_string(step));
    ExpectPlain(rig_.Run(request), plain);
    if (HasFatalFailure()) return;
  }
  ExpectCacheIntact(slots);
}

// A prompt's chunk attends to all earlier blocks and to itself, without the CPU.
TEST_P(AnySplitTest, ChunksSeeTheirPastAndNotTheirFuture) {
  const std::vector<int> slots = AddBatch(rig_, 192, {200, 330}, TestSeed());
  for (const int chunk : {1, 7, 64, 130, 63, 2}) {
    StepRequest request{.share = {.handoff = false}, .keep = true};
    request.parts.push_back({slots[0], testing::RandomTokens(TestSeed() + 1, chunk)});
    request.parts.push_back({slots[1], {5}});
    const std::vector<testing::PlainOutput> plain = rig_.Plain(request);
    SCOPED_TRACE("chunk " + std::to_string(chunk));
    ExpectPlain(rig_.Run(request), plain);
    if (HasFatalFailure()) return;
  }
  ExpectCacheIntact(slots);
}

std::string CaseName(const ::testing::TestParamInfo<std::tuple<Shape, PlacementCase>>& info) {
  return std::get<0>(info.param).name + std::get<1>(info.param).name;
}
INSTANTIATE_TEST_SUITE_P(Shapes, AnySplitTest,
                         ::testing::Combine(::testing::ValuesIn(testing::AllShapes()),
                                            ::testing::ValuesIn(testing::AllPlacements())),
                         CaseName);

}  // namespace
}  // namespace writescope
