// Prompts of a small model with the heads of DeepSeek-V2-Lite: long chunks attend to keys and
// values of heads, short ones to the latents. Only on a GPU that computes in bf16 is there a
// difference.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "engine/runtime/engine.h"
#include "tests/support/collect_sink.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_device.h"

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

}  // namespace
}  // namespace writescope::runtime
