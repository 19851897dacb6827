// An engine on the demo checkpoint with little device memory, and requests to it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/runtime/engine.h"
#include "tests/support/collect_sink.h"
#include "tests/support/demo_prompt.h"

namespace writescope::testing {

inline const std::string kDemo = WRITESCOPE_DEPLOY_DIR "/demo-model";

inline runtime::EngineOptions DemoOptions() {
  runtime::EngineOptions options;
  options.model_dir = kDemo;
  options.vram_budget_bytes = 22 << 20;  // KV of less than 2,000 tokens
  options.host_budget_bytes = 512 << 20;
  options.max_sequences = 8;
  options.progress_interval = absl::Milliseconds(20);
  return options;
}

// Of the plan for these options: what it takes of the device beside KV. Their budget has to hold
// it.
inline int64_t FixedDeviceBytes(const runtime::EngineOptions& options) {
  const auto plan = runtime::Engine::Plan(options);
  EXPECT_TRUE(plan.ok()) << plan.status();
  int64_t size_bytes = 0;
  for (const auto& item : plan.ok() ? plan->items : std::vector<runtime::MemoryPlan::Item>()) {
    if (item.on_device && item.name != "KV region device") size_bytes += item.size_bytes;
  }
  return size_bytes;
}

inline std::unique_ptr<runtime::Engine> MakeEngine(const runtime::EngineOptions& options,
                                                   runtime::EngineObserver* observer = nullptr) {
  auto engine = runtime::Engine::Create(options, observer);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return engine.ok() ? *std::move(engine) : nullptr;
}

inline runtime::GenerateRequest TextRequest(const std::string& text, int64_t max_tokens) {
  runtime::GenerateRequest request;
  request.prompt = std::vector<runtime::PromptSegment>{{.text = text}};
  request.sampling.temperature = 0;
  request.stopping.max_tokens = max_tokens;
  return request;
}

// A prompt of `num_tokens`: the beginning of `text`, then the question for the city's code.
inline std::vector<TokenId> AskForCode(const runtime::Engine& engine, std::vector<TokenId> text,
                                       size_t num_tokens, const std::string& city) {
  const auto question = engine.Tokenize({{.text = Question(city)}}, false);
  EXPECT_TRUE(question.ok()) << question.status();
  if (!question.ok()) return {};
  EXPECT_GE(text.size() + question->size(), num_tokens);
  text.resize(num_tokens - question->size());
  text.insert(text.end(), question->begin(), question->end());
  return text;
}

inline std::shared_ptr<CollectSink> RunToEnd(runtime::Engine& engine,
                                             runtime::GenerateRequest request) {
  auto sink = std::make_shared<CollectSink>();
  const auto id = engine.Submit(std::move(request), sink);
  EXPECT_TRUE(id.ok()) << id.status();
  EXPECT_TRUE(!id.ok() || sink->Await());
  return sink;
}

}  // namespace writescope::testing
