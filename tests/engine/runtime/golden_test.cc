// The reference outputs of each family, over prompt chunk sizes, placements and shares.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/support/goldens.h"
#include "tests/support/test_device.h"
#include "tests/support/tiny_model.h"

namespace writescope {
namespace {

using testing::ArgMax;
using testing::Driver;
using testing::ExpertTape;
using testing::Golden;
using testing::Margin;
using testing::MaxError;
using testing::TinyModel;
using testing::TinyModelOptions;

const std::string kGoldens = WRITESCOPE_TESTDATA_DIR "/goldens/";
constexpr float kBound = 5e-4f;

struct Case {
  std::string name;
  std::array<int64_t, kvcache::kNumRegions> blocks;
  attention::SharePlan share;
};

class GoldenTest : public ::testing::TestWithParam<std::string> {};

void CheckPrompt(TinyModel& tiny, const Golden& golden, int chunk,
                 const attention::SharePlan& share) {
  Driver driver(tiny);
  auto logits = driver.Feed(golden.prompt, chunk, /*all_logits=*/true, share);
  ASSERT_TRUE(logits.ok()) << logits.status();
  ASSERT_EQ(logits->size(), golden.prompt.size());
  const size_t first = golden.prompt.size() - golden.logits.size();
  for (size_t i = 0; i < golden.logits.size(); ++i) {
    ASSERT_LE(MaxError((*logits)[first + i], golden.logits[i]), kBound) << "position " << first + i;
  }
  std::vector<float> last = logits->back();
  for (size_t i = 0; i < golden.greedy.size(); ++i) {
    ASSERT_LE(MaxError(last, golden.greedy_logits[i]), kBound) << "greedy token " << i;
    ASSERT_EQ(ArgMax(last), golden.greedy[i]) << "greedy token " << i;
    auto next = driver.Feed({golden.greedy[i]}, 1, true, share);
    ASSERT_TRUE(next.ok()) << next.status();
    last = next->back();
  }
}

TEST_P(GoldenTest, EveryPlacementShareAndChunkMatchesTheReference) {
  if (testing::ComputesInBf16()) GTEST_SKIP() << "the bound is that of float32";
  const std::vector<Case> cases = {
      {"all on the device", {64, 0, 0, 0}, {}},
      {"all swing, GPU alone", {0, 0, 64, 0}, {.meet = false, .cpu_share = 0, .handoff = true}},
      {"all swing, half", {0, 0, 64, 0}, {.meet = false, .cpu_share = 0.5, .handoff = true}},
      {"all swing, CPU alone", {0, 0, 64, 0}, {.meet = false, .cpu_share = 1, .handoff = true}},
      {"all swing, meet", {0, 0, 64, 0}, {.meet = true, .cpu_share = 0, .handoff = true}},
      {"four regions, meet", {3, 20, 20, 20}, {.meet = true, .cpu_share = 0, .handoff = true}},
      {"four regions, 0.6", {3, 20, 20, 20}, {.meet = false, .cpu_share = 0.6, .handoff = true}},
  };
  const std::vector<int> chunks = {2048, 64, 7, 1, 2048, 130, 64};
  for (size_t c = 0; c < cases.size(); ++c) {
    TinyModelOptions options{.dir = kGoldens + GetParam(), .blocks = cases[c].blocks};
    auto tiny = TinyModel::Load(options);
    ASSERT_TRUE(tiny.ok()) << tiny.status();
    for (const int length : testing::kGoldenPromptLengths) {
      SCOPED_TRACE(cases[c].name + ", chunk " + std::to_string(chunks[c]) + ", prompt " +
                   std::to_string(length));
      CheckPrompt(**tiny,
                  testing::ReadGolden(kGoldens + GetParam(), length, (*tiny)->config.vocab_size),
                  chunks[c], cases[c].share);
      if (HasFatalFailure()) return;
    }
    EXPECT_EQ((*tiny)->runner->cache().blocks().moved_bytes(), 0);
  }
}

// The float32 run that a rounded one is held to is always one of float32 products.
absl::StatusOr<std::unique_ptr<TinyModel>> LoadExact(const TinyModelOptions& options) {
  const bool rounded = testing::ComputesInBf16();
  if (rounded) setenv("WRITESCOPE_TEST_COMPUTE", "f32", 1);
  auto exact = TinyModel::Load(options);
  if (rounded) setenv("WRITESCOPE_TEST_COMPUTE", "bf16", 1);
  return exact;
}

TEST_P(GoldenTest, Bf16KvStaysCloseWithTheExpertsOfTheF32Run) {
  TinyModelOptions options{.dir = kGoldens + GetParam(), .blocks = {0, 0, 64, 0}};
  auto exact = LoadExact(options);
  options.kv_dtype = KvDtype::kBf16;
  auto rounded = TinyModel::Load(options);
  ASSERT_TRUE(exact.ok() && rounded.ok());
  const double rms_bound = testing::ComputesInBf16() ? 0.2 : 0.1;
  double sum_squares = 0;
  int64_t count = 0;
  float worst = 0;
  int num_clear = 0;
  for (const int length : testing::kGoldenPromptLengths) {
    const Golden golden =
        testing::ReadGolden(kGoldens + GetParam(), length, (*exact)->config.vocab_size);
    ExpertTape tape((*exact)->config);
    (*exact)->runner->decoder().SetChoiceHook([&](int layer) { return tape.Record(layer); });
    (*rounded)->runner->decoder().SetChoiceHook([&](int layer) { return tape.Replay(layer); });
    const auto f32 = testing::AllLogits(**exact, golden, tape);
    const auto bf16 = testing::AllLogits(**rounded, golden, tape);
    const size_t first = golden.prompt.size() - golden.logits.size();
    ASSERT_EQ(f32.size(), bf16.size());
    for (size_t row = 0; row < bf16.size(); ++row) {
      const bool in_golden = row >= first && row < golden.prompt.size();
      const std::vector<float>& reference = in_golden ? golden.logits[row - first] : f32[row];
      worst = std::max(worst, MaxError(bf16[row], reference));
      for (size_t i = 0; i < reference.size(); ++i) {
        const double error = bf16[row][i] - reference[i];
        sum_squares += error * error;
        ++count;
      }
    }
    // Where the reference's choice is clear, rounding does not change it.
    for (size_t i = 0; i < golden.greedy.size(); ++i) {
      if (Margin(golden.greedy_logits[i]) < 2 * rms_bound) continue;
      ++num_clear;
      EXPECT_EQ(ArgMax(bf16[golden.prompt.size() - 1 + i]), golden.greedy[i])
          << "greedy token " << i << " after a prompt of " << length;
    }
  }
  EXPECT_GE(num_clear, 5);
  RecordProperty("clear", num_clear);
  const double rms = std::sqrt(sum_squares / static_cast<double>(count));
  RecordProperty("rms", std::to_string(rms));
  RecordProperty("worst", std::to_string(worst));
  EXPECT_LE(rms, rms_bound);
  EXPECT_LE(worst, testing::ComputesInBf16() ? 2.0f : 1.0f);
  // Were it 0, the rounding would not have happened.
  EXPECT_GT(rms, 1e-4);
}

INSTANTIATE_TEST_SUITE_P(Families, GoldenTest,
                         ::testing::Values("mixtral", "qwen3_moe", "qwen3_moe_dense0",
                                           "deepseek_v2_plain", "deepseek_v2_yarn"));

}  // namespace
}  // namespace writescope
