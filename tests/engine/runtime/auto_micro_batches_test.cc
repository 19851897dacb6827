// Steps in one micro-batch, in two, and as the engine chooses by itself: what sequences answer from
// spilled KV is the same, and the state tells how steps were taken. On a GPU, whose rates and dense
// times make the choice a real one; what the choice follows is in step_model_test.cc.
#include <gtest/gtest.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "engine/runtime/engine.h"
#include "tests/support/collect_sink.h"
#include "tests/support/demo_engine.h"
#include "tests/support/demo_prompt.h"
#include "tests/support/test_device.h"

namespace writescope::runtime {
namespace {

using testing::CollectSink;
using testing::HarborCode;
using testing::kDemo;

constexpr int kSequences = 8;
// A sequence is 1 KiB a token: so many that attention takes longer than the four layers' dense
// part.
constexpr size_t kPromptTokens = 12'000;
constexpr int kAnswerTokens = 160;

// A budget that holds all fixed parts and no KV block.
EngineOptions AllSpilled(MicroBatching batching) {
  EngineOptions options;
  options.model_dir = kDemo;
  options.vram_budget_bytes = 512 << 20;
  options.host_budget_bytes = 512 << 20;
  options.ring_bytes = 8 << 20;
  options.max_sequences = kSequences;
  options.micro_batching = batching;
  options.retention = false;
  testing::UseTestDevice(options);
  options.vram_budget_bytes = testing::FixedDeviceBytes(options);
  return options;
}

// How many steps were taken in two.
int64_t Answer(MicroBatching batching) {
  const auto created = Engine::Create(AllSpilled(batching), nullptr);
  EXPECT_TRUE(created.ok()) << created.status();
  if (!created.ok()) return -1;
  Engine& engine = **created;
  EXPECT_EQ(engine.plan().device_kv_tokens, 0);
  const std::string prose = testing::ReadText(kDemo + "/prose.txt");
  const std::vector<HarborCode> codes = testing::RandomHarborCodes(kSequences, 7);
  std::vector<std::shared_ptr<CollectSink>> sinks;
  for (size_t i = 0; i < codes.size(); ++i) {
    // Each begins elsewhere, so that none shares what another has.
    const std::string text =
        testing::PlantedProse(prose.substr(1000 * i), kPromptTokens * 9 / 2, {codes[i]});
    const auto ids = engine.Tokenize({{.text = text}}, std::nullopt);
    EXPECT_TRUE(ids.ok()) << ids.status();
    if (!ids.ok()) return -1;
    GenerateRequest request;
    // The code is in the first nine tenths of the text.
    request.prompt = testing::AskForCode(engine, *ids, kPromptTokens, codes[i].city);
    request.sampling.temperature = 0;
    request.stopping.max_tokens = kAnswerTokens;
    request.stopping.ignore_eos = true;
    sinks.push_back(std::make_shared<CollectSink>());
    EXPECT_TRUE(engine.Submit(std::move(request), sinks.back()).ok());
  }
  for (size_t i = 0; i < sinks.size(); ++i) {
    EXPECT_TRUE(sinks[i]->Await());
    EXPECT_TRUE(sinks[i]->status().ok()) << sinks[i]->status();
    EXPECT_EQ(sinks[i]->text().substr(0, 5), codes[i].code) << codes[i].city;
  }
  const EngineState state = engine.state();
  EXPECT_EQ(state.moved_bytes_total, 0);
  std::printf("%lld steps, %lld of them in two micro-batches\n",
              static_cast<long long>(state.steps_total),
              static_cast<long long>(state.ping_pong_steps_total));
  return state.ping_pong_steps_total;
}

TEST(AutoMicroBatches, AnswersAreThoseOfOneAndOfTwoAndItsStepsAreTold) {
  if (!testing::OnCuda()) GTEST_SKIP() << "minutes on the CPU device";
  EXPECT_EQ(Answer(MicroBatching::kOne), 0);
  const int64_t most = Answer(MicroBatching::kTwo);
  EXPECT_GT(most, kAnswerTokens / 2);
  const int64_t chosen = Answer(MicroBatching::kAuto);
  // The first steps go by no choice: no dense time is known.
  EXPECT_GT(chosen, 0);
  EXPECT_LT(chosen, most);
}

}  // namespace
}  // namespace writescope::runtime
