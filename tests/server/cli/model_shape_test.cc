#include "server/cli/model_shape.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "server/cli/plan.h"

namespace writescope::cli {
namespace {

const char kSource[] = WRITESCOPE_SOURCE_DIR;

model::ModelConfig Config(const std::string& name) {
  auto config = model::ReadModelConfig(std::string(kSource) + "/deploy/model-shapes/" + name);
  EXPECT_TRUE(config.ok()) << config.status();
  return *config;
}

int64_t Parameters(const std::string& name) {
  const ParameterCount count = CountParameters(Config(name));
  return count.experts + count.rest;
}

// The sizes that the checkpoints' own index files give, in bytes of bf16.
TEST(ModelShape, CountsParametersOfPublishedCheckpoints) {
  EXPECT_EQ(Parameters("mixtral-8x7b") * 2, 93'405'585'408);
  EXPECT_EQ(Parameters("qwen3-30b-a3b") * 2, 61'064'245'248);
  EXPECT_EQ(Parameters("deepseek-v2-lite") * 2, 31'412'968'448);
}

TEST(ModelShape, KvBytesPerToken) {
  const auto bytes = [](const std::string& name, KvDtype dtype) {
    return ShapeOf(Config(name), name, dtype, WeightFormat::kBf16).kv_bytes_per_token;
  };
  EXPECT_EQ(bytes("mixtral-8x7b", KvDtype::kBf16), 32 * 2 * 8 * 128 * 2);
  EXPECT_EQ(bytes("qwen3-30b-a3b", KvDtype::kBf16), 48 * 2 * 4 * 128 * 2);
  EXPECT_EQ(bytes("qwen3-30b-a3b", KvDtype::kF32), 48 * 2 * 4 * 128 * 4);
  EXPECT_EQ(bytes("deepseek-v2-lite", KvDtype::kBf16), 27 * (512 + 64) * 2);
}

TEST(ModelShape, Int4ShrinksTheExpertsOnly) {
  const model::ModelConfig config = Config("qwen3-30b-a3b");
  const auto bf16 = ShapeOf(config, "q", KvDtype::kBf16, WeightFormat::kBf16);
  const auto int4 = ShapeOf(config, "q", KvDtype::kBf16, WeightFormat::kInt4);
  EXPECT_EQ(bf16.weight_bytes - bf16.expert_weight_bytes,
            int4.weight_bytes - int4.expert_weight_bytes);
  // 4 bits and a 16-bit scale for each 128 values.
  EXPECT_EQ(int4.expert_weight_bytes * 16 * 128, bf16.expert_weight_bytes * (4 * 128 + 16));
}

TEST(Plan, PredictsOrSaysWhatIsMissing) {
  const std::string deploy = std::string(kSource) + "/deploy/";
  PlanFlags flags;
  flags.model_dir = deploy + "model-shapes/deepseek-v2-lite/";
  flags.profile = deploy + "machine-profiles/a100-pcie4.json";
  flags.context_tokens = {8192, 160'000};
  const auto text = FormatPlan(flags);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_THAT(*text, ::testing::HasSubstr("deepseek-v2-lite: 27 layers"));
  EXPECT_THAT(*text, ::testing::HasSubstr("\n     8192 "));
  EXPECT_THAT(*text, ::testing::HasSubstr("\n   160000 "));
  EXPECT_THAT(*text, ::testing::Not(::testing::HasSubstr("above the model's")));
  flags.context_tokens = {163'840, 163'841};
  EXPECT_THAT(*FormatPlan(flags),
              ::testing::ContainsRegex("163840 [^\n]*x\n +163841 [^\n]*x  above "
                                       "the model's 163840\n$"));
  flags.vram_budget_bytes = int64_t{8} << 30;
  EXPECT_EQ(FormatPlan(flags).status().code(), absl::StatusCode::kResourceExhausted);
  flags.profile = deploy + "no-such-file.json";
  EXPECT_THAT(std::string(FormatPlan(flags).status().message()),
              ::testing::HasSubstr("no-such-file.json"));
}

// The CPU device's budgets are of some MiB; a worker there takes 10 MiB beside weights and KV.
TEST(ModelShape, PlanOfASmallBudgetLeavesRoomForKvAsAWorkerDoes) {
  const std::string deploy = std::string(kSource) + "/deploy/";
  PlanFlags flags;
  flags.model_dir = deploy + "demo-model";
  flags.profile = deploy + "machine-profiles/v100-pcie3.json";
  flags.vram_budget_bytes = int64_t{64} << 20;
  const auto text = FormatPlan(flags);
  ASSERT_TRUE(text.ok()) << text.status();
  // writescope-worker --plan-only says 39424.
  EXPECT_THAT(*text, ::testing::HasSubstr("workspace 8.0 MiB, ring 5.5 MiB"));
  EXPECT_THAT(*text, ::testing::ContainsRegex("tokens     39[0-9][0-9][0-9] resident"));
  // A GPU's is as large as it was.
  flags.vram_budget_bytes = int64_t{8} << 30;
  const auto large = FormatPlan(flags);
  ASSERT_TRUE(large.ok()) << large.status();
  EXPECT_THAT(*large, ::testing::HasSubstr("workspace 512.0 MiB, ring 256.0 MiB"));
}

}  // namespace
}  // namespace writescope::cli
