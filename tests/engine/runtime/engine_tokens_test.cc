// What the engine counts as read and generated, and text that it cannot read.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "engine/runtime/engine.h"
#include "engine/runtime/error_reason.h"
#include "nlohmann/json.hpp"
#include "tests/support/demo_engine.h"
#include "tests/support/demo_prompt.h"
#include "tests/support/temp_dir.h"

namespace writescope::runtime {
namespace {

using testing::CollectSink;
using testing::DemoOptions;
using testing::kDemo;
using testing::MakeEngine;
using testing::RunToEnd;
using testing::TextRequest;

// Whether it comes true within some seconds.
template <typename Condition>
bool Eventually(const Condition& condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return false;
}

TEST(EngineTokensTest, AreCountedAsTheyCome) {
  const auto engine = MakeEngine(DemoOptions());
  ASSERT_NE(engine, nullptr);
  const int64_t prompt_tokens = std::ssize(*engine->Tokenize({{.text = "The whale was"}}, {}));
  GenerateRequest request = TextRequest("The whale was", 5000);
  request.stopping.ignore_eos = true;
  const auto sink = std::make_shared<CollectSink>();
  const auto id = engine->Submit(request, sink);
  ASSERT_TRUE(id.ok()) << id.status();
  EXPECT_TRUE(Eventually([&] { return engine->state().generated_tokens_total >= 10; }));
  EXPECT_LT(sink->tokens().size(), 5000u);  // It goes on.
  EXPECT_EQ(engine->state().prompt_tokens_total, prompt_tokens);
  engine->Cancel(*id);
  ASSERT_TRUE(sink->Await());
  // Cancelled or not, they were generated.
  const auto generated = std::ssize(sink->tokens());
  EXPECT_TRUE(Eventually([&] { return engine->state().generated_tokens_total == generated; }));
}

// It takes a step like those of answers; within another one's step, too, whose link is slow.
TEST(EngineTokensTest, APromptOfOneTokenIsReadForItsLogprobsAlone) {
  EngineOptions options = DemoOptions();
  options.link_bytes_per_s = 4e6;
  options.retention = false;
  const auto engine = MakeEngine(options);
  ASSERT_NE(engine, nullptr);
  GenerateRequest request;
  request.prompt = std::vector<TokenId>{300};
  request.stopping.max_tokens = 0;
  request.prompt_logprobs = 1;
  const auto long_one = std::make_shared<CollectSink>();
  for (const bool beside_another : {false, true}) {
    if (beside_another) {
      GenerateRequest spilled = TextRequest(testing::ReadText(kDemo + "/prose.txt"), 5000);
      std::get<std::vector<PromptSegment>>(spilled.prompt)[0].text.resize(14000);
      spilled.stopping.ignore_eos = true;
      ASSERT_TRUE(engine->Submit(std::move(spilled), long_one).ok());
      ASSERT_TRUE(long_one->AwaitTokens(2));
    }
    const auto sink = std::make_shared<CollectSink>();
    ASSERT_TRUE(engine->Submit(request, sink).ok());
    ASSERT_TRUE(sink->Await(absl::Seconds(20))) << beside_another;
    ASSERT_TRUE(sink->status().ok()) << sink->status();
    EXPECT_TRUE(sink->tokens().empty());
    EXPECT_EQ(sink->last().finish->reason, FinishReason::kMaxTokens);
    size_t positions = 0;
    for (const GenerateEvent& event : sink->events()) positions += event.prompt_logprobs.size();
    EXPECT_EQ(positions, 1u);
  }
  EXPECT_FALSE(long_one->Await(absl::ZeroDuration()));
}

TEST(EngineTokensTest, OfAPromptCountOnceHoweverItIsRead) {
  EngineOptions options = DemoOptions();
  options.prefill_chunk_tokens = 64;
  const auto engine = MakeEngine(options);
  ASSERT_NE(engine, nullptr);
  const std::string text = testing::ReadText(kDemo + "/prose.txt").substr(0, 3000);
  const auto first = RunToEnd(*engine, TextRequest(text, 3));
  const int64_t prompt_tokens = first->last().usage.prompt_tokens;
  ASSERT_GT(prompt_tokens, 3 * 64);
  const auto read = [&](int64_t tokens) {
    return Eventually([&] { return engine->state().prompt_tokens_total == tokens; });
  };
  EXPECT_TRUE(read(prompt_tokens));
  const auto second = RunToEnd(*engine, TextRequest(text, 0));  // From the prefix cache.
  EXPECT_GT(second->last().usage.cached_prompt_tokens, 0);
  EXPECT_TRUE(read(2 * prompt_tokens));
  EXPECT_EQ(engine->state().generated_tokens_total, 3);
}

TEST(EngineTokensTest, TextWithATokenThatTheModelLacksIsRefused) {
  const testing_support::TempDir dir;
  for (const char* file : {"config.json", "model.safetensors", "tokenizer_config.json"}) {
    std::filesystem::create_symlink(kDemo + "/" + file, dir.File(file));
  }
  auto tokenizer = nlohmann::json::parse(testing::ReadText(kDemo + "/tokenizer.json"));
  EngineOptions options = DemoOptions();
  const int vocab = MakeEngine(options)->model().vocab_size;
  tokenizer["added_tokens"].push_back({{"id", vocab}, {"content", "<pad>"}, {"special", true}});
  std::ofstream(dir.File("tokenizer.json")) << tokenizer;
  options.model_dir = dir.path();
  const auto engine = MakeEngine(options);
  ASSERT_NE(engine, nullptr);
  GenerateRequest request = TextRequest("a<pad>", 1);
  std::get<std::vector<PromptSegment>>(request.prompt)[0].allow_special = true;
  const auto refused = engine->Submit(request, std::make_shared<CollectSink>());
  EXPECT_EQ(ErrorReason(refused.status()), "INVALID_TOKEN_ID");
  EXPECT_NE(refused.status().message().find("(\"<pad>\")"), std::string::npos) << refused.status();
  EXPECT_FALSE(engine->Tokenize({{.text = "<pad>", .allow_special = true}}, false).ok());
  EXPECT_TRUE(RunToEnd(*engine, TextRequest("a<pad>", 1))->status().ok());  // Spelled out.
}

}  // namespace
}  // namespace writescope::runtime
