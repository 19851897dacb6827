// A cache that is too small for all sequences: what they say is what each would say alone.
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/runtime/engine.h"
#include "tests/support/collect_sink.h"
#include "tests/support/demo_engine.h"
#include "tests/support/demo_prompt.h"

namespace writescope::runtime {
namespace {

using testing::CollectSink;
using testing::DemoOptions;
using testing::kDemo;
using testing::MakeEngine;
using testing::RunToEnd;
using testing::TextRequest;

// Looks whether `got` is the greedy answer to this prompt alone: the engine reads both as one
// prompt, in which each token of the answer has to be the most likely, and as likely as it was.
// (That takes a third of the time that it takes to generate the answer once more.)
void ExpectAsAlone(Engine& engine, const std::string& prompt, const CollectSink& got) {
  auto tokens = engine.Tokenize({{.text = prompt}}, std::nullopt);
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  const size_t prompt_tokens = tokens->size();
  std::vector<PositionLogprobs> answer;
  for (const GenerateEvent& event : got.events()) {
    tokens->insert(tokens->end(), event.tokens.begin(), event.tokens.end());
    answer.insert(answer.end(), event.logprobs.begin(), event.logprobs.end());
  }
  GenerateRequest request;
  request.prompt = *tokens;
  request.stopping.max_tokens = 0;
  request.prompt_logprobs = 1;
  const auto sink = RunToEnd(engine, std::move(request));
  ASSERT_TRUE(sink->status().ok()) << sink->status();
  std::vector<PositionLogprobs> alone;
  for (const GenerateEvent& event : sink->events()) {
    alone.insert(alone.end(), event.prompt_logprobs.begin(), event.prompt_logprobs.end());
  }
  ASSERT_EQ(alone.size(), prompt_tokens + answer.size());
  for (size_t i = 0; i < answer.size(); ++i) {
    const PositionLogprobs& want = alone[prompt_tokens + i];
    ASSERT_TRUE(want.token.has_value() && answer[i].token.has_value() && !want.top.empty());
    ASSERT_EQ(want.token->token, answer[i].token->token);
    // In float32 two ways to sum stray from each other by some 1e-5; one token of a thousand that
    // was read wrongly has moved a logarithm by 2e-3.
    constexpr float kTolerance = 3e-4f;
    ASSERT_GE(want.token->logprob, want.top[0].logprob - kTolerance)
        << "token " << i << " is " << want.token->token << "; alone " << want.top[0].token
        << " is more likely";
    ASSERT_NEAR(want.token->logprob, answer[i].token->logprob, kTolerance) << "token " << i;
  }
}

TEST(EngineTest, MoreThanTheCacheHoldsIsPausedOrReadAgainNotLost) {
  EngineOptions options = DemoOptions();
  options.kv_dtype = KvDtype::kF32;
  options.host_budget_bytes = 6 << 20;
  options.prefix_cache = false;
  options.max_sequences = 8;
  // Of requests without a limit of their own admission expects less than they come to hold.
  options.max_context_tokens = 1400;  // Far beyond what admission expects
  const auto engine = MakeEngine(options);
  const std::string prose = testing::ReadText(kDemo + "/prose.txt");
  const auto prompt = [&](size_t i) { return prose.substr(i * 500, 2500); };
  std::vector<std::shared_ptr<CollectSink>> sinks;
  for (size_t i = 0; i < 6; ++i) {
    GenerateRequest request = TextRequest(prompt(i), 0);
    request.stopping.max_tokens.reset();
    request.stopping.ignore_eos = true;
    request.logprobs = 1;
    sinks.push_back(std::make_shared<CollectSink>());
    ASSERT_TRUE(engine->Submit(request, sinks.back()).ok());
  }
  for (const auto& sink : sinks) {
    ASSERT_TRUE(sink->Await(absl::Seconds(120)));
    EXPECT_TRUE(sink->status().ok()) << sink->status();
    EXPECT_GT(sink->tokens().size(), 300u);
  }
  const EngineState state = engine->state();
  EXPECT_EQ(state.moved_bytes_total, 0);
  // Otherwise this shows nothing.
  EXPECT_GT(state.preemptions_pause_total + state.preemptions_drop_total, 0);
  for (size_t i = 0; i < sinks.size(); ++i) ExpectAsAlone(*engine, prompt(i), *sinks[i]);
}

class KeepTimes final : public EngineObserver {
 public:
  void OnStep(const StepStats&) override {}
  void OnInterTokenSeconds(double) override {}
  void OnRequestDone(const RequestTimes& times) override { times_.push_back(times); }

  // To be called when the engine is gone.
  const std::vector<RequestTimes>& times() const { return times_; }

 private:
  std::vector<RequestTimes> times_;
};

TEST(EngineTest, ARequestThatIsReadAgainCountsOnce) {
  EngineOptions options = DemoOptions();
  options.host_budget_bytes = 3 << 19;
  options.max_context_tokens = 700;  // Far beyond what admission expects
  KeepTimes observer;
  auto engine = MakeEngine(options, &observer);
  ASSERT_NE(engine, nullptr);
  const std::string prose = testing::ReadText(kDemo + "/prose.txt");
  std::vector<std::shared_ptr<CollectSink>> sinks;
  for (size_t i = 0; i < 5; ++i) {
    GenerateRequest request = TextRequest(prose.substr(i * 500, 1000), 0);
    request.stopping.max_tokens.reset();
    request.stopping.ignore_eos = true;
    sinks.push_back(std::make_shared<CollectSink>());
    ASSERT_TRUE(engine->Submit(request, sinks.back()).ok());
  }
  int64_t prompt_tokens = 0;
  for (const auto& sink : sinks) {
    ASSERT_TRUE(sink->Await(absl::Seconds(120)));
    EXPECT_TRUE(sink->status().ok()) << sink->status();
    prompt_tokens += sink->last().usage.prompt_tokens;
    EXPECT_EQ(sink->last().usage.cached_prompt_tokens, 0);
  }
  engine->Stop();
  const EngineState state = engine->state();
  EXPECT_GT(state.preemptions_drop_total, 0);  // Otherwise this shows nothing.
  EXPECT_EQ(state.prompt_tokens_total, prompt_tokens);
  EXPECT_EQ(state.prefix_query_tokens_total, prompt_tokens);
  engine.reset();
  ASSERT_EQ(observer.times().size(), sinks.size());
  for (const RequestTimes& times : observer.times()) {
    EXPECT_GT(times.prefill_seconds, 0);
    EXPECT_NEAR(times.queue_seconds + times.prefill_seconds, times.first_token_seconds, 1e-6);
  }
}

}  // namespace
}  // namespace writescope::runtime
