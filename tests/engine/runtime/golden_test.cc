// The reference outputs of each family, over prompt chunk sizes, placements and shares.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/safetensors.h"
#include "tests/support/test_device.h"
#include "tests/support/tiny_model.h"

namespace writescope {
namespace {

using testing::Driver;
using testing::TinyModel;
using testing::TinyModelOptions;

const std::string kGoldens = WRITESCOPE_TESTDATA_DIR "/goldens/";
constexpr int kPromptLengths[] = {5, 16, 33, 130, 517};
constexpr float kBound = 5e-4f;

struct Golden {
  std::vector<TokenId> prompt;
  std::vector<std::vector<float>> logits;  // Of the last positions of the prompt
  std::vector<TokenId> greedy;
  std::vector<std::vector<float>> greedy_logits;
};

template <typename T>
std::vector<T> Read(const model::SafetensorsFile& file, const std::string& name) {
  const model::TensorView* tensor = file.Find(name);
  std::vector<T> values(static_cast<size_t>(tensor->num_elements()));
  std::memcpy(values.data(), tensor->bytes.data(), values.size() * sizeof(T));
  return values;
}

std::vector<std::vector<float>> Rows(const std::vector<float>& flat, size_t width) {
  std::vector<std::vector<float>> rows;
  for (size_t i = 0; i < flat.size(); i += width) {
    rows.emplace_back(flat.begin() + static_cast<int64_t>(i),
                      flat.begin() + static_cast<int64_t>(i + width));
  }
  return rows;
}

Golden ReadGolden(const std::string& folder, int length, int vocab) {
  const auto file = model::SafetensorsFile::Open(kGoldens + folder + "/golden.safetensors");
  EXPECT_TRUE(file.ok()) << file.status();
  const std::string suffix = "." + std::to_string(length);
  Golden golden;
  golden.prompt = Read<TokenId>(*file, "prompt" + suffix);
  golden.logits = Rows(Read<float>(*file, "logits" + suffix), static_cast<size_t>(vocab));
  golden.greedy = Read<TokenId>(*file, "greedy" + suffix);
  golden.greedy_logits =
      Rows(Read<float>(*file, "greedy_logits" + suffix), static_cast<size_t>(vocab));
  return golden;
}

float MaxError(const std::vector<float>& a, const std::vector<float>& b) {
  float worst = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const float error = std::fabs(a[i] - b[i]);
    worst = error <= worst ? worst : error;  // A NaN is the worst.
  }
  return worst;
}

// By how much the best token is ahead of the next.
float Margin(std::vector<float> logits) {
  std::nth_element(logits.begin(), logits.begin() + 1, logits.end(), std::greater<>());
  return logits[0] - logits[1];
}

TokenId ArgMax(const std::vector<float>& logits) {
  return static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

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
    for (const int length : kPromptLengths) {
      SCOPED_TRACE(cases[c].name + ", chunk " + std::to_string(chunks[c]) + ", prompt " +
                   std::to_string(length));
      CheckPrompt(**tiny, ReadGolden(GetParam(), length, (*tiny)->config.vocab_size), chunks[c],
                  cases[c].share);
      if (HasFatalFailure()) return;
    }
    EXPECT_EQ((*tiny)->runner->cache().blocks().moved_bytes(), 0);
  }
}

// Writes down, or dictates, the experts of every step and layer of one sequence.
class ExpertTape {
 public:
  explicit ExpertTape(const model::ModelConfig& config) : k_(config.moe.experts_per_token) {}
  void BeginStep(size_t num_tokens) {
    num_tokens_ = num_tokens;
    ++step_;
  }
  void Rewind() { step_ = -1; }
  ops::ExpertChoice Record(int layer) {
    auto& choice = choices_[{step_, layer}];
    choice.resize(num_tokens_ * static_cast<size_t>(k_));
    return {.record = choice.data()};
  }
  ops::ExpertChoice Replay(int layer) { return {.replay = choices_.at({step_, layer}).data()}; }

 private:
  const int k_;
  int step_ = -1;
  size_t num_tokens_ = 0;
  std::map<std::pair<int, int>, std::vector<int32_t>> choices_;
};

// The logits of the prompt's last positions and of the greedy continuation, teacher-forced.
std::vector<std::vector<float>> AllLogits(TinyModel& tiny, const Golden& golden, ExpertTape& tape) {
  Driver driver(tiny);
  const attention::SharePlan share{.meet = false, .cpu_share = 0.5, .handoff = true};
  tape.Rewind();
  tape.BeginStep(golden.prompt.size());
  auto logits = driver.Feed(golden.prompt, 2048, true, share);
  EXPECT_TRUE(logits.ok()) << logits.status();
  for (const TokenId token : golden.greedy) {
    tape.BeginStep(1);
    auto next = driver.Feed({token}, 1, true, share);
    EXPECT_TRUE(next.ok()) << next.status();
    logits->push_back(next->back());
  }
  return *logits;
}

// The float32 run that a rounded one is held to is always one of float32 products.
absl::StatusOr<std::unique_ptr<TinyModel>> LoadExact(const TinyModelOptions& options) {
  const bool rounded = testing::ComputesInBf16();
  if (rounded) setenv("WRITESCOPE_TEST_COMPUTE", "f32", 1);
  auto exact = TinyModel::Load(options);
  if (rounded) setenv("WRITESCOPE_TEST_COMPUTE", "bf16", 1);
  return exact;
}

// Tiny random routers flip between experts of nearly equal score when KV is rounded, which says
// nothing about the rounding; so the experts of the f32 run are replayed.
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
  for (const int length : kPromptLengths) {
    const Golden golden = ReadGolden(GetParam(), length, (*exact)->config.vocab_size);
    ExpertTape tape((*exact)->config);
    (*exact)->runner->decoder().SetChoiceHook([&](int layer) { return tape.Record(layer); });
    (*rounded)->runner->decoder().SetChoiceHook([&](int layer) { return tape.Replay(layer); });
    const auto f32 = AllLogits(**exact, golden, tape);
    const auto bf16 = AllLogits(**rounded, golden, tape);
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
