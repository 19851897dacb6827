// What a step that cannot be run leaves behind: nothing. And that decode steps, submitted call by
// call or as recordings, are steps like others.
#include "engine/runtime/model_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/test_device.h"
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
      ASSERT_TRUE(cache.AwaitCommits(slot).ok());
    }
    const std::vector<TokenId> next = {3};
    const auto step = [&](int* slice) {
      const std::vector<StepSlice> slices = {{.slot = good.slot(), .tokens = next},
                                             {.slot = bad.slot(), .tokens = next}};
      const auto sink = [](int, int64_t, const RowLogits&) {};
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

// The largest difference, or infinity.
float MaxError(const std::vector<float>& a, const std::vector<float>& b) {
  float worst = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const float error = std::fabs(a[i] - b[i]);
    worst = error <= worst ? worst : error;  // A NaN is the worst.
  }
  return worst;
}

class ResidentSteps : public ::testing::TestWithParam<const char*> {};

// The same two prompts three times: their next tokens by Run one sequence at a time, by RunResident
// call by call, and by RunResident with recordings. The first fills a unit on the way.
TEST_P(ResidentSteps, AreStepsLikeOthers) {
  constexpr int kSteps = 9;
  for (const KvDtype dtype : {KvDtype::kF32, KvDtype::kBf16}) {
    auto tiny =
        TinyModel::Load({.dir = std::string(WRITESCOPE_TESTDATA_DIR "/goldens/") + GetParam(),
                         .kv_dtype = dtype,
                         .max_sequences = 6,
                         .blocks = {64, 0, 0, 0},
                         .prefix_cache = false,
                         .max_recordings = 8});
    ASSERT_TRUE(tiny.ok()) << tiny.status();
    ModelRunner& runner = *(*tiny)->runner;
    std::vector<std::unique_ptr<Driver>> drivers;
    for (int i = 0; i < 6; ++i) {
      drivers.push_back(std::make_unique<Driver>(**tiny, 8));
      ASSERT_TRUE(drivers.back()->Feed(Tokens(i % 2, i % 2 == 0 ? 60 : 131), 64, false, {}).ok());
    }
    for (int step = 0; step < kSteps; ++step) {
      const std::vector<TokenId> next = {3 + step, 90 - step};
      std::vector<std::vector<float>> logits[3];
      std::vector<kernels::RowMax> largest[3];
      for (int i = 0; i < 2; ++i) {
        auto row = drivers[i]->Feed({next[i]}, 1, true, {});
        ASSERT_TRUE(row.ok()) << row.status();
        logits[0].push_back((*row)[0]);
      }
      for (const bool replay : {false, true}) {
        std::vector<StepSlice> slices;
        for (size_t i = 0; i < 2; ++i) {
          slices.push_back({.slot = drivers[(replay ? 4 : 2) + i]->slot(),
                            .tokens = std::span(next).subspan(i, 1),
                            .only_largest = replay && i == static_cast<size_t>(step % 3)});
        }
        int full_slice = -1;
        const auto sink = [&](int slice, int64_t, const RowLogits& row) {
          logits[replay ? 2 : 1].emplace_back(row.all.begin(), row.all.end());
          largest[replay ? 2 : 1].push_back(row.largest);
          EXPECT_EQ(row.all.empty(), slices[static_cast<size_t>(slice)].only_largest);
          if (row.all.empty()) return;
          const kernels::RowMax max =
              kernels::MaxOfRowRef(static_cast<int64_t>(row.all.size()), row.all.data());
          EXPECT_EQ(row.largest.index, max.index);
          EXPECT_EQ(row.largest.value, max.value);
        };
        const absl::Status status = runner.RunResident(slices, sink, &full_slice, replay);
        ASSERT_TRUE(status.ok()) << status;
      }
      for (int i = 0; i < 2; ++i) {
        SCOPED_TRACE("step " + std::to_string(step) + " of sequence " + std::to_string(i));
        // In bf16 an expert may change hands by a rounding. A GPU weighs bf16 keys in bf16.
        const bool rounded_keys = testing::OnCuda() && dtype == KvDtype::kBf16;
        const float bound = testing::ComputesInBf16() ? 0.5f : rounded_keys ? 1e-2f : 1e-4f;
        EXPECT_LE(MaxError(logits[1][i], logits[0][i]), bound);
        const float replay_bound = testing::ComputesInBf16() ? 0.1f : 1e-5f;
        EXPECT_NEAR(largest[2][i].value, largest[1][i].value, replay_bound);
        if (logits[2][i].empty()) continue;
        EXPECT_LE(MaxError(logits[2][i], logits[1][i]), replay_bound);
      }
    }
    // The first step of a shape goes call by call, too. Those by Run are of another shape.
    const int replayed = testing::OnCuda() ? kSteps - 1 + 2 * kSteps - 1 : 0;
    EXPECT_EQ(runner.recording_counts().replayed_steps, replayed);
    EXPECT_EQ(runner.recording_counts().failures, 0);
  }
}

// The second sequence has a block in host memory, of which a copy is kept on the device; the block
// that the first one's token fills takes the room of that copy.
TEST(ModelRunner, AResidentStepWhoseBlockTakesAKeptCopysRoomIsCalledOff) {
  auto tiny = TinyModel::Load({.dir = WRITESCOPE_TESTDATA_DIR "/goldens/qwen3_moe",
                               .blocks = {4, 0, 16, 0},
                               .prefix_cache = false});
  ASSERT_TRUE(tiny.ok()) << tiny.status();
  ModelRunner& runner = *(*tiny)->runner;
  const attention::SharePlan share = {.cpu_share = 0.5, .handoff = true};
  Driver grows(**tiny, 4);
  ASSERT_TRUE(grows.Feed(Tokens(1, 127), 64, false, share).ok());
  Driver kept(**tiny, 8);
  ASSERT_TRUE(kept.Feed(Tokens(2, 192), 64, false, share).ok());
  const std::vector<TokenId> next = {3};
  const StepSlice of_grows = {.slot = grows.slot(), .tokens = next};
  const StepSlice of_kept = {.slot = kept.slot(), .tokens = next};
  const auto sink = [](int, int64_t, const RowLogits&) {};
  int full_slice = -1;
  EXPECT_FALSE(runner.IsResident(kept.slot()));
  ASSERT_TRUE(
      runner.Run(std::span(&of_kept, 1), {.share = share, .retain_keep_free = 0}, sink, &full_slice)
          .ok());
  ASSERT_TRUE(runner.IsResident(kept.slot()));
  ASSERT_TRUE(runner.IsResident(grows.slot()));

  const std::vector<StepSlice> both = {of_kept, of_grows};
  const absl::Status status = runner.RunResident(both, sink, &full_slice);
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_EQ(runner.cache().length(kept.slot()), 193);
  EXPECT_EQ(runner.cache().length(grows.slot()), 127);
  EXPECT_FALSE(runner.IsResident(kept.slot()));
  ASSERT_TRUE(runner.IsResident(grows.slot()));
  EXPECT_TRUE(runner.RunResident(std::span(&of_grows, 1), sink, &full_slice).ok());
  EXPECT_TRUE(
      runner.Run(std::span(&of_kept, 1), {.share = share}, sink, &full_slice).status().ok());
}

class SpilledSteps : public ::testing::TestWithParam<const char*> {
 protected:
  // Logits by step: of two sequences with spilled KV, and of a resident one that steps inside.
  // Which of its blocks the CPU takes is fixed, so that any two runs are the same.
  static std::vector<std::vector<std::vector<float>>> Run(int max_recordings,
                                                          RecordingCounts* counts) {
    std::vector<std::vector<std::vector<float>>> steps;
    auto tiny =
        TinyModel::Load({.dir = std::string(WRITESCOPE_TESTDATA_DIR "/goldens/") + GetParam(),
                         .max_sequences = 3,
                         .blocks = {0, 0, 64, 0},
                         .prefix_cache = false,
                         .max_recordings = max_recordings});
    EXPECT_TRUE(tiny.ok()) << tiny.status();
    ModelRunner& runner = *(*tiny)->runner;
    const attention::SharePlan share = {.cpu_share = 0.5, .handoff = true};
    // The first has no block yet: all its KV is in its open tail, on the device.
    std::vector<std::unique_ptr<Driver>> drivers;
    for (const int length : {50, 190, 300}) {
      drivers.push_back(std::make_unique<Driver>(**tiny, 8));
      EXPECT_TRUE(drivers.back()->Feed(Tokens(length, length), 64, false, share).ok());
    }
    EXPECT_TRUE(runner.IsResident(drivers[0]->slot()));
    EXPECT_FALSE(runner.IsResident(drivers[1]->slot()));
    for (int step = 0; step < 7; ++step) {
      std::vector<std::vector<float>>& logits = steps.emplace_back(3);
      const std::vector<TokenId> next = {3 + step, 90 - step, 40 + step};
      const auto slice = [&](size_t i) {
        return StepSlice{.slot = drivers[i]->slot(), .tokens = std::span(next).subspan(i, 1)};
      };
      int full_slice = -1;
      const auto inside = [&](const std::function<bool()>&) {
        if (!logits[0].empty()) return;
        const std::vector<StepSlice> slices = {slice(0)};
        const absl::Status status = runner.RunResident(
            slices,
            [&](int, int64_t, const RowLogits& row) {
              logits[0].assign(row.all.begin(), row.all.end());
            },
            &full_slice);
        EXPECT_TRUE(status.ok()) << status;
      };
      const std::vector<StepSlice> slices = {slice(1), slice(2)};
      const auto result = runner.Run(
          slices, {.share = share, .between = inside},
          [&](int index, int64_t, const RowLogits& row) {
            logits[1 + static_cast<size_t>(index)].assign(row.all.begin(), row.all.end());
          },
          &full_slice);
      EXPECT_TRUE(result.ok()) << result.status();
    }
    *counts = runner.recording_counts();
    return steps;
  }
};

TEST_P(SpilledSteps, AreTheSameAsRecorded) {
  RecordingCounts plain, recorded;
  const auto want = Run(0, &plain);
  const auto got = Run(8, &recorded);
  EXPECT_EQ(plain.replayed_steps, 0);
  // Of both kinds of steps all but the first.
  EXPECT_EQ(recorded.replayed_steps, testing::OnCuda() ? 2 * 6 : 0);
  EXPECT_EQ(recorded.failures, 0);
  ASSERT_EQ(got.size(), want.size());
  for (size_t step = 0; step < want.size(); ++step) {
    for (size_t i = 0; i < 3; ++i) {
      SCOPED_TRACE("step " + std::to_string(step) + " of sequence " + std::to_string(i));
      EXPECT_FALSE(want[step][i].empty());
      EXPECT_LE(MaxError(got[step][i], want[step][i]), testing::ComputesInBf16() ? 0.1f : 1e-5f);
    }
  }
}

const auto kFamilies = ::testing::Values("mixtral", "qwen3_moe", "qwen3_moe_dense0",
                                         "deepseek_v2_plain", "deepseek_v2_yarn");
INSTANTIATE_TEST_SUITE_P(Families, ResidentSteps, kFamilies,
                         [](const auto& info) { return std::string(info.param); });
INSTANTIATE_TEST_SUITE_P(Families, SpilledSteps, kFamilies,
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace writescope::runtime
