// What a step that cannot be run leaves behind: nothing.
#include "engine/runtime/model_runner.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/tiny_model.h"

namespace writescope::runtime {
namespace {

using testing::Driver;
using testing::TinyModel;

std::vector<TokenId> Tokens(int first, int count) {
  std::vector<TokenId> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((first + 7 * i) % 100);
  return tokens;
}

// Of two sequences the second has a block that is no more as it was sealed; the first would fill a
// unit with the step's token, so that a block has been taken for it.
TEST(ModelRunner, AChangedBlockNamesItsSequenceAndLeavesNothingBehind) {
  for (const bool resident : {true, false}) {
    SCOPED_TRACE(resident ? "resident" : "spilled");
    auto tiny = TinyModel::Load({.dir = WRITESCOPE_TESTDATA_DIR "/goldens/qwen3_moe",
                                 .blocks = {resident ? 16 : 0, 0, resident ? 0 : 16, 0}});
    ASSERT_TRUE(tiny.ok()) << tiny.status();
    if ((*tiny)->device->name() != "cpu") GTEST_SKIP() << "the test changes memory from the CPU";
    ModelRunner& runner = *(*tiny)->runner;
    kvcache::InplaceKvCache& cache = runner.cache();
    const attention::SharePlan share = {.cpu_share = 0.5, .handoff = true};
    Driver good(**tiny, 4);
    Driver bad(**tiny, 4);
    ASSERT_TRUE(good.Feed(Tokens(1, 127), 64, false, share).ok());
    ASSERT_TRUE(bad.Feed(Tokens(2, 130), 64, false, share).ok());
    for (const int slot : {good.slot(), bad.slot()}) {
      ASSERT_TRUE(cache.PollCommits(slot, /*wait=*/true).ok());
    }
    const std::vector<TokenId> next = {3};
    const auto step = [&](int* slice) {
      const std::vector<StepSlice> slices = {{.slot = good.slot(), .tokens = next},
                                             {.slot = bad.slot(), .tokens = next}};
      const auto sink = [](int, int64_t, std::span<const float>) {};
      *slice = -1;
      if (resident) return runner.RunResident(slices, sink, slice);
      return runner.Run(slices, {.share = share}, sink, slice).status();
    };
    const int64_t free_blocks = cache.FreeBlocks();
    const kvcache::BlockPlace place = cache.blocks().home(cache.SealedBlocks(bad.slot())[1]);
    std::byte& changed = cache.blocks().region(place.region).Address(0, place.index)[5];
    changed ^= std::byte{1};
    int slice = -1;
    for (int i = 0; i < 3; ++i) {
      const absl::Status status = step(&slice);
      EXPECT_TRUE(absl::IsDataLoss(status)) << status;
      EXPECT_EQ(slice, 1);
      EXPECT_EQ(cache.FreeBlocks(), free_blocks);
      EXPECT_EQ(cache.length(good.slot()), 127);
    }
    changed ^= std::byte{1};
    const absl::Status status = step(&slice);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(slice, -1);
    EXPECT_EQ(cache.length(good.slot()), 128);
    EXPECT_EQ(cache.FreeBlocks(), free_blocks - 1);
  }
}

}  // namespace
}  // namespace writescope::runtime
