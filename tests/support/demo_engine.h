// An engine on the demo checkpoint with little device memory, and requests to it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/runtime/engine.h"
#include "tests/support/collect_sink.h"

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

inline std::unique_ptr<runtime::Engine> MakeEngine(const runtime::EngineOptions& options) {
  auto engine = runtime::Engine::Create(options, nullptr);
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

inline std::shared_ptr<CollectSink> RunToEnd(runtime::Engine& engine,
                                             runtime::GenerateRequest request) {
  auto sink = std::make_shared<CollectSink>();
  const auto id = engine.Submit(std::move(request), sink);
  EXPECT_TRUE(id.ok()) << id.status();
  EXPECT_TRUE(!id.ok() || sink->Await());
  return sink;
}

}  // namespace writescope::testing
