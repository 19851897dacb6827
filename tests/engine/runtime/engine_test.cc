// The engine behind its front door, on the demo checkpoint: answers, sharing, cancels, limits.
#include "engine/runtime/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/runtime/error_reason.h"
#include "tests/support/collect_sink.h"
#include "tests/support/demo_engine.h"
#include "tests/support/demo_prompt.h"
#include "tests/support/seed.h"

namespace writescope::runtime {
namespace {

using testing::CollectSink;
using testing::DemoOptions;
using testing::HarborCode;
using testing::kDemo;
using testing::MakeEngine;
using testing::PlantedProse;
using testing::Question;
using testing::RandomHarborCodes;
using testing::RunToEnd;
using testing::TextRequest;

roofline::ShareTable Constant(double share) { return roofline::ConstantTable(share); }

void SetShare(Engine& engine, double share, int64_t generation) {
  const auto reply = engine.SetCpuShare({.controller_id = "test",
                                         .generation = generation,
                                         .table = Constant(share),
                                         .valid_for = absl::Minutes(10)});
  ASSERT_TRUE(reply.ok()) << reply.status();
  ASSERT_EQ(reply->outcome, ShareOutcome::kApplied);
}

int64_t FreeBytes(const EngineState& state) {
  int64_t bytes = 0;
  for (const RegionState& region : state.regions) {
    bytes += region.capacity_bytes - region.used_bytes;
  }
  return bytes;
}

TEST(EngineTest, RecallsFactsFromSpilledKvForRequestsThatShareThePrefix) {
  const std::vector<HarborCode> codes = RandomHarborCodes(12, 20);
  const std::string text = PlantedProse(testing::ReadText(kDemo + "/prose.txt"), 14000, codes);
  for (const CutMode cut : {CutMode::kPlanned, CutMode::kMeet}) {
    EngineOptions options = DemoOptions();
    options.cut = cut;
    const auto engine = MakeEngine(options);
    ASSERT_NE(engine, nullptr);
    int64_t generation = 0;
    for (const double share : {0.0, 0.5, 1.0}) {
      SetShare(*engine, share, ++generation);
      std::vector<std::shared_ptr<CollectSink>> sinks;
      for (const HarborCode& code : codes) {
        sinks.push_back(std::make_shared<CollectSink>());
        const auto id = engine->Submit(TextRequest(text + Question(code.city), 6), sinks.back());
        ASSERT_TRUE(id.ok()) << id.status();
      }
      for (size_t i = 0; i < sinks.size(); ++i) {
        ASSERT_TRUE(sinks[i]->Await());
        ASSERT_TRUE(sinks[i]->status().ok()) << sinks[i]->status();
        EXPECT_EQ(sinks[i]->text().substr(0, 5), codes[i].code) << "share " << share;
      }
      const GenerateEvent last = sinks.back()->last();
      ASSERT_TRUE(last.placement.has_value());
      EXPECT_GT(last.usage.cached_prompt_tokens, 0);
      EXPECT_GT(last.placement->swing_bytes, last.placement->device_bytes);
      EXPECT_EQ(share > 0, last.placement->cpu_tokens > 0);
      EXPECT_TRUE(share < 1 || cut == CutMode::kMeet || last.placement->gpu_streamed_tokens == 0);
    }
    const EngineState state = engine->state();
    EXPECT_EQ(state.moved_bytes_total, 0);
    EXPECT_EQ(engine->machine_profile().num_layers, engine->model().num_layers);
    ASSERT_TRUE(state.last_decode_step.has_value());
    EXPECT_GT(state.last_decode_step->predicted_step_seconds, 0);
  }
}

TEST(EngineTest, GreedyTextDoesNotDependOnTheShareInF32) {
  EngineOptions options = DemoOptions();
  options.kv_dtype = KvDtype::kF32;
  options.cut = CutMode::kPlanned;
  options.prefix_cache = false;
  options.retention = false;  // A copy that is kept crosses the link at any share.
  const std::string text =
      testing::ReadText(kDemo + "/prose.txt").substr(0, 6000) + "\nFellow citizens of the Senate";
  std::vector<TokenId> first;
  const auto engine = MakeEngine(options);
  int64_t generation = 0;
  for (const double share : {0.0, 0.3, 0.77, 1.0}) {
    SetShare(*engine, share, ++generation);
    const auto sink = RunToEnd(*engine, TextRequest(text, 48));
    ASSERT_TRUE(sink->status().ok()) << sink->status();
    if (first.empty()) first = sink->tokens();
    EXPECT_EQ(sink->tokens(), first) << "share " << share;
    ASSERT_TRUE(sink->last().placement.has_value());
    EXPECT_EQ(sink->last().placement->cpu_tokens > 0, share > 0);
    EXPECT_EQ(sink->last().placement->gpu_streamed_tokens > 0, share < 1);
  }
  EXPECT_EQ(first.size(), 48u);
}

TEST(EngineTest, AcceptsTheEdgesOfWhatARequestMayAsk) {
  const auto engine = MakeEngine(DemoOptions());
  {
    const auto sink = RunToEnd(*engine, TextRequest("Call me Ishmael.", 0));
    ASSERT_TRUE(sink->status().ok()) << sink->status();
    EXPECT_TRUE(sink->tokens().empty());
    EXPECT_EQ(sink->last().finish->reason, FinishReason::kMaxTokens);
  }
  for (const size_t length : {1, 2, 63, 64, 65, 127, 128, 129, 192, 193}) {
    GenerateRequest request;
    request.prompt = std::vector<TokenId>(length, 300);
    request.sampling.temperature = 0;
    request.stopping.max_tokens = 3;
    request.stopping.ignore_eos = true;
    const auto sink = RunToEnd(*engine, std::move(request));
    ASSERT_TRUE(sink->status().ok()) << sink->status();
    EXPECT_EQ(sink->tokens().size(), 3u) << length;
  }
  {
    GenerateRequest request = TextRequest("The whale was", 12);
    request.logprobs = 3;
    request.prompt_logprobs = 2;
    const auto sink = RunToEnd(*engine, std::move(request));
    size_t prompt_positions = 0, positions = 0;
    for (const GenerateEvent& event : sink->events()) {
      prompt_positions += event.prompt_logprobs.size();
      positions += event.logprobs.size();
      for (const PositionLogprobs& p : event.logprobs) {
        ASSERT_EQ(p.top.size(), 3u);
        EXPECT_EQ(p.top[0].token, p.token->token);
        EXPECT_LE(p.token->logprob, 0);
      }
    }
    EXPECT_EQ(positions, sink->tokens().size());
    EXPECT_EQ(prompt_positions, static_cast<size_t>(sink->last().usage.prompt_tokens));
  }
}

TEST(EngineTest, APromptThatFillsTheContextSaysSo) {
  EngineOptions options = DemoOptions();
  options.max_context_tokens = 64;
  const auto engine = MakeEngine(options);
  GenerateRequest request;
  request.prompt = std::vector<TokenId>(64, 300);
  request.stopping.max_tokens = 5;
  const auto sink = RunToEnd(*engine, std::move(request));
  ASSERT_TRUE(sink->status().ok()) << sink->status();
  EXPECT_TRUE(sink->tokens().empty());
  EXPECT_EQ(sink->last().finish->reason, FinishReason::kContextFull);
}

TEST(EngineTest, ShowsTheLinkPaceThatIsSetWhileItIsIdle) {
  const auto engine = MakeEngine(DemoOptions());
  ASSERT_TRUE(engine->SetLinkPace(3e9).ok());
  EXPECT_EQ(engine->state().link_pace_bytes_per_s, 3e9);
}

TEST(EngineTest, StopsWhereItIsTold) {
  const auto engine = MakeEngine(DemoOptions());
  const std::string prompt = "Fellow citizens of the Senate";
  const auto whole = RunToEnd(*engine, TextRequest(prompt, 40));
  const std::string text = whole->text();
  ASSERT_GT(text.size(), 30u);
  GenerateRequest request = TextRequest(prompt, 40);
  const std::string stop = text.substr(12, 7);
  request.stopping.stop = {stop, "never to be seen"};
  const auto stopped = RunToEnd(*engine, request);
  EXPECT_EQ(stopped->text(), text.substr(0, text.find(stop)));
  EXPECT_EQ(stopped->last().finish->reason, FinishReason::kStopString);
  EXPECT_EQ(stopped->last().finish->matched_stop, stop);

  request = TextRequest(prompt, 40);
  request.stopping.stop_token_ids.push_back(whole->tokens()[4]);
  const auto by_token = RunToEnd(*engine, request);
  EXPECT_EQ(by_token->last().finish->reason, FinishReason::kStopToken);
  EXPECT_LE(by_token->tokens().size(), 5u);
}

TEST(EngineTest, TheSameSeedDrawsTheSameTokens) {
  EngineOptions options = DemoOptions();
  options.cut = CutMode::kPlanned;
  const auto engine = MakeEngine(options);
  GenerateRequest request = TextRequest("The whale was", 24);
  request.sampling.temperature = 1.2;
  request.sampling.top_p = 0.9;
  request.sampling.seed = 17;
  request.stopping.ignore_eos = true;
  const auto a = RunToEnd(*engine, request)->tokens();
  const auto b = RunToEnd(*engine, request)->tokens();
  request.sampling.seed = 18;
  const auto c = RunToEnd(*engine, request)->tokens();
  EXPECT_EQ(a, b);
  EXPECT_NE(a, c);
}

struct BadRequest {
  const char* name;
  std::function<void(GenerateRequest&)> spoil;
  absl::StatusCode code;
  const char* reason;
};

TEST(EngineTest, RefusesWhatMakesNoSense) {
  const auto engine = MakeEngine(DemoOptions());
  const auto invalid = absl::StatusCode::kInvalidArgument;
  const std::vector<BadRequest> cases = {
      {"empty text", [](auto& r) { r.prompt = std::vector<PromptSegment>{{.text = ""}}; }, invalid,
       "EMPTY_PROMPT"},
      {"no ids", [](auto& r) { r.prompt = std::vector<TokenId>(); }, invalid, "EMPTY_PROMPT"},
      {"id too large", [](auto& r) { r.prompt = std::vector<TokenId>{4096}; }, invalid,
       "INVALID_TOKEN_ID"},
      {"negative id", [](auto& r) { r.prompt = std::vector<TokenId>{-1}; }, invalid,
       "INVALID_TOKEN_ID"},
      {"half a character",
       [](auto& r) { r.prompt = std::vector<PromptSegment>{{.text = "a\xe6\xad"}}; }, invalid,
       "INVALID_UTF8"},
      {"too long", [](auto& r) { r.prompt = std::vector<TokenId>(32769, 5); }, invalid,
       "CONTEXT_LENGTH_EXCEEDED"},
      {"NaN temperature", [](auto& r) { r.sampling.temperature = NAN; }, invalid,
       "INVALID_PARAMETER"},
      {"negative temperature", [](auto& r) { r.sampling.temperature = -1; }, invalid,
       "INVALID_PARAMETER"},
      {"top_p 0", [](auto& r) { r.sampling.top_p = 0; }, invalid, "INVALID_PARAMETER"},
      {"min_p 1", [](auto& r) { r.sampling.min_p = 1; }, invalid, "INVALID_PARAMETER"},
      {"repetition_penalty 0", [](auto& r) { r.sampling.repetition_penalty = 0; }, invalid,
       "INVALID_PARAMETER"},
      {"empty stop", [](auto& r) { r.stopping.stop = {""}; }, invalid, "INVALID_PARAMETER"},
      {"17 stops", [](auto& r) { r.stopping.stop.assign(17, "x"); }, invalid, "INVALID_PARAMETER"},
      {"min above max", [](auto& r) { r.stopping.min_tokens = 9; }, invalid, "INVALID_PARAMETER"},
      {"logprobs 21", [](auto& r) { r.logprobs = 21; }, invalid, "INVALID_PARAMETER"},
  };
  for (const BadRequest& bad : cases) {
    GenerateRequest request = TextRequest("Hello", 4);
    bad.spoil(request);
    const auto id = engine->Submit(request, std::make_shared<CollectSink>());
    EXPECT_EQ(id.status().code(), bad.code) << bad.name << ": " << id.status();
    EXPECT_EQ(ErrorReason(id.status()), bad.reason) << bad.name;
  }
}

TEST(EngineTest, RefusesToGoOnWhereEveryTokenEndsTheText) {
  EngineOptions options = DemoOptions();
  options.model_dir = WRITESCOPE_TESTDATA_DIR "/goldens/qwen3_moe";
  const auto engine = MakeEngine(options);
  ASSERT_NE(engine, nullptr);
  const int vocab_size = engine->model().vocab_size;
  ASSERT_FALSE(engine->model().eos_tokens.empty());
  GenerateRequest request;
  request.prompt = std::vector<TokenId>{5, 6};
  request.stopping.max_tokens = 4;
  // With the model's own end of sequence all of them, and one of them twice.
  for (TokenId id = 0; id < vocab_size; ++id) {
    if (id != engine->model().eos_tokens.front()) request.stopping.stop_token_ids.push_back(id);
  }
  request.stopping.stop_token_ids.push_back(request.stopping.stop_token_ids.back());
  EXPECT_TRUE(RunToEnd(*engine, request)->status().ok());
  request.stopping.min_tokens = 2;
  const auto id = engine->Submit(request, std::make_shared<CollectSink>());
  EXPECT_EQ(id.status().code(), absl::StatusCode::kInvalidArgument) << id.status();
  EXPECT_EQ(ErrorReason(id.status()), "INVALID_PARAMETER");
  request.stopping.ignore_eos = true;
  EXPECT_TRUE(RunToEnd(*engine, request)->status().ok());
  EXPECT_EQ(engine->state().nan_logits_total, 0);
}

TEST(EngineTest, ABudgetOneByteShortSaysHowMuchIsMissing) {
  EngineOptions options = DemoOptions();
  options.ring_bytes = 4 << 20;
  options.vram_budget_bytes = 64 << 20;
  options.vram_budget_bytes = testing::FixedDeviceBytes(options);
  EXPECT_TRUE(Engine::Plan(options).ok());
  --options.vram_budget_bytes;
  const absl::Status status = Engine::Plan(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("too small by 0.1 MiB"), absl::string_view::npos) << status;
}

TEST(EngineTest, AnIdInFlightIsRefusedAndFreeAfterwards) {
  const auto engine = MakeEngine(DemoOptions());
  GenerateRequest request = TextRequest("The whale was", 2000);
  request.request_id = "one";
  request.stopping.ignore_eos = true;
  const auto first = std::make_shared<CollectSink>();
  ASSERT_TRUE(engine->Submit(request, first).ok());
  const auto second = engine->Submit(request, std::make_shared<CollectSink>());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(engine->Abort("one"));
  ASSERT_TRUE(first->Await());
  EXPECT_TRUE(first->status().ok());
  EXPECT_EQ(first->last().finish->reason, FinishReason::kAborted);
  EXPECT_FALSE(engine->Abort("one"));
  request.stopping.max_tokens = 2;
  EXPECT_TRUE(RunToEnd(*engine, request)->status().ok());
}

TEST(EngineTest, ASlowReaderEndsOnlyItself) {
  const auto engine = MakeEngine(DemoOptions());
  GenerateRequest request = TextRequest("The whale was", 300);
  request.stopping.ignore_eos = true;
  const auto slow = std::make_shared<CollectSink>();
  slow->RefuseEventsAfter(0);
  const auto good = std::make_shared<CollectSink>();
  ASSERT_TRUE(engine->Submit(request, slow).ok());
  ASSERT_TRUE(engine->Submit(request, good).ok());
  ASSERT_TRUE(slow->Await());
  EXPECT_EQ(slow->status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(slow->status()), "SLOW_CONSUMER");
  ASSERT_TRUE(good->Await());
  EXPECT_TRUE(good->status().ok());
  EXPECT_EQ(good->tokens().size(), 300u);
}

TEST(EngineTest, BlocksComeBackAfterRandomCancels) {
  EngineOptions options = DemoOptions();
  options.max_sequences = 6;
  options.max_queue = 1000;
  const auto engine = MakeEngine(options);
  const int64_t free_before = FreeBytes(engine->state());
  const std::string prose = testing::ReadText(kDemo + "/prose.txt");
  std::mt19937 rng(7);
  int cancelled = 0;
  for (int round = 0; round < 50; ++round) {
    std::vector<std::shared_ptr<CollectSink>> sinks;
    std::vector<RequestId> ids;
    for (int i = 0; i < 10; ++i) {
      GenerateRequest request = TextRequest(prose.substr(rng() % 2000, 1 + rng() % 3000), 30);
      sinks.push_back(std::make_shared<CollectSink>());
      const auto id = engine->Submit(request, sinks.back());
      ASSERT_TRUE(id.ok()) << id.status();
      ids.push_back(*id);
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      sinks[i]->AwaitTokens(rng() % 3, absl::Milliseconds(rng() % 20));
      engine->Cancel(ids[i]);
    }
    for (const auto& sink : sinks) {
      ASSERT_TRUE(sink->Await());
      if (absl::IsCancelled(sink->status())) {
        ++cancelled;
      } else {
        EXPECT_TRUE(sink->status().ok()) << sink->status();
      }
    }
  }
  EXPECT_GT(cancelled, 300);
  ASSERT_TRUE(engine->AwaitIdle(absl::Seconds(10)));
  // The state is published at the end of the round in which the last request ended.
  for (int i = 0; i < 100 && FreeBytes(engine->state()) != free_before; ++i) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(FreeBytes(engine->state()), free_before);
  EXPECT_EQ(engine->state().moved_bytes_total, 0);
}

// A sequence whose spilled blocks are kept on the device counts as resident until another one needs
// the room: in a step of its own, or in the very step that was planned for it.
TEST(EngineTest, ACopyThatGivesWayToABlockEndsNoRequest) {
  EngineOptions options = DemoOptions();
  options.model_dir = WRITESCOPE_TESTDATA_DIR "/goldens/qwen3_moe";
  options.ring_bytes = 1 << 20;
  options.prefill_chunk_tokens = 256;
  options.max_queue = 1000;
  const auto plan = Engine::Plan(options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  options.vram_budget_bytes =
      testing::FixedDeviceBytes(options) + 10 * kBlockTokens * plan->kv_bytes_per_token;
  const auto engine = MakeEngine(options);
  ASSERT_NE(engine, nullptr);
  std::mt19937 rng(testing_support::TestSeed());
  std::vector<std::shared_ptr<CollectSink>> sinks;
  for (int i = 0; i < 500; ++i) {
    // Beginnings of one text, so that sequences begin with each other's blocks in host memory.
    GenerateRequest request;
    std::vector<TokenId> prompt(rng() % 4 == 0 ? 250 : 30 + rng() % 150);
    for (size_t t = 0; t < prompt.size(); ++t) {
      prompt[t] = static_cast<TokenId>((t * 37 + t / 11) % 120);
    }
    request.prompt = std::move(prompt);
    request.stopping.max_tokens = 1 + rng() % 100;
    request.stopping.ignore_eos = true;
    request.sampling.seed = i;
    sinks.push_back(std::make_shared<CollectSink>());
    ASSERT_TRUE(engine->Submit(std::move(request), sinks.back()).ok());
  }
  for (const auto& sink : sinks) {
    ASSERT_TRUE(sink->Await(absl::Seconds(120)));
    EXPECT_TRUE(sink->status().ok()) << sink->status();
  }
  EXPECT_EQ(engine->state().failed_steps_total, 0);
}

TEST(EngineTest, AShortChatDoesNotWaitForTheLinkOfALongOne) {
  EngineOptions options = DemoOptions();
  options.link_bytes_per_s = 4e6;  // A step of the long one takes some hundred milliseconds.
  options.retention = false;
  const auto engine = MakeEngine(options);
  SetShare(*engine, 0, 1);
  const std::string prose = testing::ReadText(kDemo + "/prose.txt");
  const auto start = [&](const std::string& text, int64_t max_tokens) {
    GenerateRequest request = TextRequest(text, max_tokens);
    request.stopping.ignore_eos = true;
    auto sink = std::make_shared<CollectSink>();
    EXPECT_TRUE(engine->Submit(request, sink).ok());
    return sink;
  };
  const auto long_one = start(PlantedProse(prose, 14000, RandomHarborCodes(1, 1)), 1000);
  ASSERT_TRUE(long_one->AwaitTokens(2));
  const size_t before = long_one->tokens().size();
  const auto chat = start("Fellow citizens of the Senate", 60);
  ASSERT_TRUE(chat->Await());
  EXPECT_EQ(chat->tokens().size(), 60u) << chat->status();
  ASSERT_TRUE(chat->last().placement.has_value());
  EXPECT_EQ(chat->last().placement->gpu_streamed_tokens, 0);
  const size_t meanwhile = long_one->tokens().size() - before;
  EXPECT_LE(meanwhile, 20u);  // One for one if the chat took part in the other's steps only
}

TEST(EngineTest, AReadPromptReportsProgressAndACancelEndsIt) {
  EngineOptions options = DemoOptions();
  options.prefill_chunk_tokens = 128;
  options.progress_interval = absl::Milliseconds(5);
  const auto engine = MakeEngine(options);
  const std::string text =
      PlantedProse(testing::ReadText(kDemo + "/prose.txt"), 60000, RandomHarborCodes(1, 1));
  const auto sink = std::make_shared<CollectSink>();
  const auto id = engine->Submit(TextRequest(text, 4), sink);
  ASSERT_TRUE(id.ok()) << id.status();
  for (int i = 0; i < 2000 && sink->progress_events() < 3; ++i)
    absl::SleepFor(absl::Milliseconds(5));
  EXPECT_GE(sink->progress_events(), 3);
  const absl::Time asked = absl::Now();
  engine->Cancel(*id);
  ASSERT_TRUE(sink->Await());
  EXPECT_EQ(sink->status().code(), absl::StatusCode::kCancelled);
  EXPECT_LT(absl::Now() - asked, absl::Seconds(2));
}

TEST(EngineTest, APassedDeadlineAndADrainAreAnswered) {
  const auto engine = MakeEngine(DemoOptions());
  GenerateRequest request = TextRequest("The whale was", 5000);
  request.stopping.ignore_eos = true;
  request.deadline = absl::Now() + absl::Milliseconds(50);
  const auto late = RunToEnd(*engine, request);
  EXPECT_EQ(late->status().code(), absl::StatusCode::kDeadlineExceeded);
  engine->StartDrain();
  const auto refused = engine->Submit(TextRequest("x", 1), std::make_shared<CollectSink>());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ErrorReason(refused.status()), "DRAINING");
  EXPECT_TRUE(engine->AwaitIdle(absl::Seconds(5)));
}

}  // namespace
}  // namespace writescope::runtime
