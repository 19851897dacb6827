// What four bits a weight cost in accuracy: the logits of the reference checkpoints, and how well a
// trained model predicts text, with the experts quantised and as they are.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/tokenizer/tokenizer.h"
#include "tests/support/demo_prompt.h"
#include "tests/support/goldens.h"
#include "tests/support/test_device.h"
#include "tests/support/tiny_model.h"

namespace writescope {
namespace {

using testing::Driver;
using testing::ExpertTape;
using testing::Golden;
using testing::TinyModel;
using testing::TinyModelOptions;

// 4-bit experts on CUDA are multiplied in bf16 only.
bool HasInt4() { return !testing::OnCuda() || testing::ComputesInBf16(); }

struct Family {
  std::string folder;
  // Of the root mean square error of the logits over that of their spread. Random weights lose more
  // than trained ones: every group is as wide as its largest value, and every product counts.
  double bound;
};

class Int4AccuracyTest : public ::testing::TestWithParam<Family> {};

TEST_P(Int4AccuracyTest, LogitsStayCloseWithTheExpertsOfTheSource) {
  if (!HasInt4()) GTEST_SKIP() << "no int4 in float32 on CUDA";
  TinyModelOptions options{.dir = WRITESCOPE_TESTDATA_DIR "/goldens/" + GetParam().folder,
                           .kv_dtype = KvDtype::kBf16,
                           .blocks = {0, 0, 64, 0}};
  auto source = TinyModel::Load(options);
  options.experts = ops::WeightFormat::kInt4;
  auto int4 = TinyModel::Load(options);
  ASSERT_TRUE(source.ok() && int4.ok()) << source.status() << int4.status();
  double error = 0, spread = 0;
  for (const int length : testing::kGoldenPromptLengths) {
    const Golden golden = testing::ReadGolden(options.dir, length, (*source)->config.vocab_size);
    ExpertTape tape((*source)->config);
    (*source)->runner->decoder().SetChoiceHook([&](int layer) { return tape.Record(layer); });
    (*int4)->runner->decoder().SetChoiceHook([&](int layer) { return tape.Replay(layer); });
    const auto want = testing::AllLogits(**source, golden, tape);
    const auto got = testing::AllLogits(**int4, golden, tape);
    ASSERT_EQ(got.size(), want.size());
    for (size_t row = 0; row < want.size(); ++row) {
      double mean = 0;
      for (const float logit : want[row]) mean += logit / static_cast<double>(want[row].size());
      for (size_t i = 0; i < want[row].size(); ++i) {
        error += std::pow(got[row][i] - want[row][i], 2);
        spread += std::pow(want[row][i] - mean, 2);
      }
    }
  }
  const double relative = std::sqrt(error / spread);
  RecordProperty("relative_error", std::to_string(relative));
  EXPECT_LE(relative, GetParam().bound);
  EXPECT_GT(relative, 1e-3);  // Were it less, the experts would not have been quantised.
}

INSTANTIATE_TEST_SUITE_P(Families, Int4AccuracyTest,
                         ::testing::Values(Family{"mixtral", 0.36}, Family{"qwen3_moe", 0.27},
                                           Family{"qwen3_moe_dense0", 0.09},
                                           Family{"deepseek_v2_plain", 0.16},
                                           Family{"deepseek_v2_yarn", 0.08}),
                         [](const auto& info) { return info.param.folder; });

// Mean of -log p of each next token, in nats.
double MeanSurprise(const TinyModelOptions& options, const std::vector<TokenId>& tokens) {
  auto tiny = TinyModel::Load(options);
  EXPECT_TRUE(tiny.ok()) << tiny.status();
  if (!tiny.ok()) return NAN;
  Driver driver(**tiny);
  const auto logits = driver.Feed(tokens, 512, /*all_logits=*/true, {});
  EXPECT_TRUE(logits.ok()) << logits.status();
  if (!logits.ok()) return NAN;
  double sum = 0;
  for (size_t i = 0; i + 1 < tokens.size(); ++i) {
    double all = 0;
    for (const float logit : (*logits)[i]) all += std::exp(static_cast<double>(logit));
    sum += std::log(all) - (*logits)[i][tokens[i + 1]];
  }
  return sum / static_cast<double>(tokens.size() - 1);
}

TEST(Int4PerplexityTest, TextIsHardlyLessExpected) {
  if (!HasInt4()) GTEST_SKIP() << "no int4 in float32 on CUDA";
  const std::string demo = WRITESCOPE_DEPLOY_DIR "/demo-model";
  const auto tokenizer = tokenizer::Tokenizer::Load(demo);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const std::string prose = testing::ReadText(demo + "/prose.txt");
  const tokenizer::Segment segment = {.text = prose};
  auto tokens = (*tokenizer)->Encode({&segment, 1}, false);
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  ASSERT_GT(tokens->size(), 2048u);
  tokens->resize(2048);
  TinyModelOptions options{.dir = demo, .kv_dtype = KvDtype::kBf16, .blocks = {40, 0, 0, 0}};
  const double source = MeanSurprise(options, *tokens);
  options.experts = ops::WeightFormat::kInt4;
  const double int4 = MeanSurprise(options, *tokens);
  RecordProperty("source_perplexity", std::to_string(std::exp(source)));
  RecordProperty("int4_perplexity", std::to_string(std::exp(int4)));
  EXPECT_LT(source, 3.0);  // It does predict: 4,096 equal tokens would be 8.3.
  EXPECT_LE(int4, source + 0.08);
  EXPECT_NE(int4, source);
}

}  // namespace
}  // namespace writescope
