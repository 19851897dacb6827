// Prompts of a small model with the heads of DeepSeek-V2-Lite: long chunks attend to keys and
// values of heads, short ones and decode steps to the latents. Only on a GPU that computes in bf16
// is there a difference.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "engine/runtime/engine.h"
#include "engine/runtime/model_runner.h"
#include "tests/support/collect_sink.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_device.h"
#include "tests/support/tiny_model.h"

namespace writescope::runtime {
namespace {

constexpr char kConfig[] = R"({
  "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
  "vocab_size": 1000, "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 16,
  "num_key_value_heads": 16, "q_lora_rank": null, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 512, "first_k_dense_replace": 2,
  "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
  "max_position_embeddings": 8192, "rope_theta": 10000, "rms_norm_eps": 1e-6,
  "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": false
})";

// Log-probabilities of a prompt's tokens, read in chunks of so many.
std::vector<float> Logprobs(const std::string& dir, int chunk, const std::vector<TokenId>& prompt) {
  EngineOptions options;
  options.model_dir = dir;
  options.load_format = LoadFormat::kDummy;
  options.vram_budget_bytes = int64_t{1} << 30;
  options.host_budget_bytes = int64_t{1} << 30;
  options.max_sequences = 1;
  options.prefill_chunk_tokens = chunk;
  testing::UseTestDevice(options);
  const auto engine = Engine::Create(options, nullptr);
  EXPECT_TRUE(engine.ok()) << engine.status();
  if (!engine.ok()) return {};
  GenerateRequest request;
  request.prompt = prompt;
  request.sampling.temperature = 0;
  request.stopping.max_tokens = 1;
  request.stopping.ignore_eos = true;
  request.prompt_logprobs = 0;
  const auto sink = std::make_shared<testing::CollectSink>();
  EXPECT_TRUE((*engine)->Submit(std::move(request), sink).ok());
  EXPECT_TRUE(sink->Await());
  EXPECT_TRUE(sink->status().ok()) << sink->status();
  std::vector<float> values;
  for (const GenerateEvent& event : sink->events()) {
    for (const PositionLogprobs& position : event.prompt_logprobs) {
      if (position.token.has_value()) values.push_back(position.token->logprob);
    }
  }
  return values;
}

double RmsDifference(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::pow(double{a[i]} - b[i], 2);
  return std::sqrt(sum / static_cast<double>(a.size()));
}

TEST(LatentPromptTest, LongChunksGiveWhatShortOnesDo) {
  if (!testing::OnCuda() || !testing::ComputesInBf16()) GTEST_SKIP() << "one form for all chunks";
  const testing_support::TempDir dir;
  std::ofstream(dir.File("config.json")) << kConfig;
  std::vector<TokenId> prompt;
  for (int i = 0; i < 3000; ++i) prompt.push_back(static_cast<TokenId>(int64_t{7919} * i % 997));
  const std::vector<float> latents = Logprobs(dir.path(), 128, prompt);
  const std::vector<float> also_latents = Logprobs(dir.path(), 192, prompt);
  const std::vector<float> heads = Logprobs(dir.path(), 1024, prompt);
  ASSERT_EQ(latents.size(), prompt.size() - 1);
  ASSERT_EQ(heads.size(), latents.size());
  ASSERT_EQ(also_latents.size(), latents.size());
  // Rounding differs with the size of products, too.
  const double mean_square = RmsDifference(latents, std::vector<float>(latents.size(), 0));
  std::printf("rms of log-probabilities %.3g, between chunks of latents %.3g, to heads %.3g\n",
              mean_square, RmsDifference(latents, also_latents), RmsDifference(latents, heads));
  EXPECT_GT(mean_square, 1);
  EXPECT_LE(RmsDifference(latents, heads), 0.01 * mean_square);
}

std::vector<TokenId> Tokens(int first, int count) {
  std::vector<TokenId> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((first + 7919 * i) % 997);
  return tokens;
}

using Logits = std::vector<float>;

// One sequence steps until its steps are recorded, another one's prompt is read by heads, and the
// first steps on: logits of its steps, with spilled KV or all on the device.
std::vector<Logits> StepsAroundAPrompt(const std::string& dir, bool resident, int max_recordings,
                                       int64_t* replayed) {
  std::vector<Logits> steps;
  auto tiny = testing::TinyModel::Load({.dir = dir,
                                        .dummy = true,
                                        .kv_dtype = KvDtype::kBf16,
                                        .blocks = {resident ? 32 : 0, 0, resident ? 0 : 32, 0},
                                        .ring_bytes = 1 << 20,
                                        .prefix_cache = false,
                                        .max_recordings = max_recordings});
  EXPECT_TRUE(tiny.ok()) << tiny.status();
  if (!tiny.ok()) return steps;
  ModelRunner& runner = *(*tiny)->runner;
  testing::Driver stepping(**tiny, 8), reading(**tiny, 8);
  EXPECT_TRUE(stepping.Feed(Tokens(5, 300), 300, false, {}).ok());
  for (int step = 0; step < 6; ++step) {
    if (step == 4) {
      EXPECT_TRUE(reading.Feed(Tokens(11, 310), 310, false, {}).ok());
    }
    const std::vector<TokenId> next = {3 + step};
    const std::vector<StepSlice> slices = {{.slot = stepping.slot(), .tokens = next}};
    Logits& logits = steps.emplace_back();
    const auto sink = [&](int, int64_t, const RowLogits& row) {
      logits.assign(row.all.begin(), row.all.end());
    };
    int full_slice = -1;
    const absl::Status status =
        resident
            ? runner.RunResident(slices, sink, &full_slice)
            : runner.Run(slices, {.share = {.cpu_share = 0.5, .handoff = true}}, sink, &full_slice)
                  .status();
    EXPECT_TRUE(status.ok()) << status;
  }
  *replayed = runner.recording_counts().replayed_steps;
  EXPECT_EQ(runner.recording_counts().failures, 0);
  return steps;
}

TEST(LatentPromptTest, ReplayedStepsAttendToLatentsAfterAPromptByHeads) {
  const testing_support::TempDir dir;
  std::ofstream(dir.File("config.json")) << kConfig;
  for (const bool resident : {false, true}) {
    SCOPED_TRACE(resident ? "resident" : "spilled");
    int64_t none = 0, replayed = 0;
    const std::vector<Logits> want = StepsAroundAPrompt(dir.path(), resident, 0, &none);
    const std::vector<Logits> got = StepsAroundAPrompt(dir.path(), resident, 8, &replayed);
    EXPECT_EQ(none, 0);
    // All but the first, which goes call by call.
    EXPECT_EQ(replayed, testing::OnCuda() ? 5 : 0);
    ASSERT_EQ(got.size(), want.size());
    for (size_t step = 0; step < want.size(); ++step) {
      ASSERT_FALSE(want[step].empty());
      ASSERT_EQ(got[step].size(), want[step].size());
      const double rms = RmsDifference(want[step], Logits(want[step].size(), 0));
      const double difference = RmsDifference(got[step], want[step]);
      std::printf("step %zu: rms of logits %.3g, of differences %.3g\n", step, rms, difference);
      EXPECT_GT(rms, 0);
      // The CPU's sums are taken in another order, and what comes of that is rounded to bf16.
      EXPECT_LE(difference, 0.05 * rms) << "step " << step;
    }
  }
}

}  // namespace
}  // namespace writescope::runtime
