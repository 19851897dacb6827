// config.json: every value and feature that is refused, by the name in its message.
#include <string>
#include <vector>

#include "engine/model/config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/support/safetensors_writer.h"

namespace writescope::model {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing_support::ReadFile;

std::string ShapeFile(const std::string& model) {
  return WRITESCOPE_DEPLOY_DIR "/model-shapes/" + model + "/config.json";
}

// The published config with fields replaced.
absl::StatusOr<ModelConfig> ParseEdited(const std::string& model, const json& edits) {
  json config = json::parse(ReadFile(ShapeFile(model)));
  for (const auto& [key, value] : edits.items()) config[key] = value;
  return ParseModelConfig(config.dump());
}

struct BadCase {
  const char* model;
  json edits;
  absl::StatusCode code;
  std::vector<const char*> in_message;
};

const auto kInvalid = absl::StatusCode::kInvalidArgument;
const auto kUnimplemented = absl::StatusCode::kUnimplemented;

constexpr char kMixtral[] = "mixtral-8x7b";
constexpr char kQwen[] = "qwen3-30b-a3b";
constexpr char kV2[] = "deepseek-v2-lite";

std::vector<BadCase> FeatureCases() {
  return {
      {kMixtral, {{"architectures", {"LlamaForCausalLM"}}}, kUnimplemented, {"LlamaForCausalLM"}},
      {kMixtral, {{"architectures", nullptr}, {"model_type", "llama"}}, kUnimplemented, {"llama"}},
      {kMixtral,
       {{"architectures", {"DeepseekV4ForCausalLM"}}, {"model_type", "deepseek_v4"}},
       kUnimplemented,
       {"DeepseekV4ForCausalLM"}},
      {kMixtral,
       {{"architectures", nullptr}, {"model_type", "deepseek_v4"}},
       kUnimplemented,
       {"model_type", "deepseek_v4"}},
      {kMixtral, {{"model_type", "qwen3_moe"}}, kInvalid, {"MixtralForCausalLM", "qwen3_moe"}},
      {kMixtral,
       {{"architectures", {"MixtralForCausalLM", "Qwen3MoeForCausalLM"}}},
       kInvalid,
       {"MixtralForCausalLM", "Qwen3MoeForCausalLM"}},
      {kMixtral, {{"architectures", nullptr}, {"model_type", nullptr}}, kInvalid, {"both absent"}},
      {kMixtral, {{"architectures", "MixtralForCausalLM"}}, kInvalid, {"list of strings"}},
      {kMixtral, {{"sliding_window", 4096}}, kUnimplemented, {"sliding_window is 4096", "32768"}},
      {kQwen, {{"use_sliding_window", true}}, kUnimplemented, {"sliding_window is 4096"}},
      {kQwen,
       {{"layer_types", {"full_attention", "sliding_attention"}}},
       kUnimplemented,
       {"layer_types", "sliding_attention"}},
      {kQwen,
       {{"per_layer_config", {{"7", {{"num_experts_per_tok", 4}}}}}},
       kUnimplemented,
       {"per_layer_config.7 is an object"}},
      {kQwen, {{"attention_bias", true}}, kUnimplemented, {"attention_bias is true"}},
      {kV2, {{"mlp_bias", true}}, kUnimplemented, {"mlp_bias is true"}},
      {kV2, {{"attention_bias", "no"}}, kInvalid, {"attention_bias is \"no\""}},
      {kQwen, {{"hidden_act", "gelu"}}, kUnimplemented, {"hidden_act is \"gelu\""}},
      {kQwen, {{"is_causal", false}}, kUnimplemented, {"is_causal is false"}},
      {kQwen,
       {{"quantization_config", {{"quant_method", "fp8"}}}},
       kUnimplemented,
       {"quantization_config", "fp8"}},
      {kQwen, {{"torch_dtype", "float8"}}, kInvalid, {"torch_dtype", "float8"}},
      {kQwen, {{"dtype", "float16"}}, kInvalid, {"float16", "bfloat16", "two spellings"}},
  };
}

std::vector<BadCase> SizeCases() {
  return {
      {kQwen, {{"num_hidden_layers", 0}}, kInvalid, {"num_hidden_layers is 0"}},
      {kQwen, {{"num_attention_heads", -32}}, kInvalid, {"num_attention_heads is -32"}},
      {kQwen, {{"hidden_size", 2048.5}}, kInvalid, {"hidden_size is 2048.5"}},
      {kQwen, {{"hidden_size", "2048"}}, kInvalid, {"hidden_size is \"2048\""}},
      {kQwen, {{"hidden_size", true}}, kInvalid, {"hidden_size is true"}},
      {kQwen, {{"hidden_size", {1}}}, kInvalid, {"hidden_size is an array"}},
      {kQwen, {{"vocab_size", 2000000000}}, kInvalid, {"vocab_size is 2000000000"}},
      {kQwen, {{"vocab_size", 1e300}}, kInvalid, {"vocab_size is 1e+300"}},
      {kQwen,
       {{"max_position_embeddings", uint64_t{1} << 63}},
       kInvalid,
       {"max_position_embeddings is 9223372036854775808"}},
      {kQwen, {{"moe_intermediate_size", nullptr}}, kInvalid, {"moe_intermediate_size", "absent"}},
      {kQwen, {{"num_key_value_heads", 5}}, kInvalid, {"num_attention_heads is 32", "5"}},
      {kMixtral, {{"hidden_size", 4100}}, kInvalid, {"hidden_size is 4100", "head_dim"}},
      {kQwen, {{"head_dim", 127}}, kInvalid, {"head_dim is 127"}},
      {kV2, {{"qk_rope_head_dim", 63}}, kInvalid, {"qk_rope_head_dim is 63"}},
      {kV2, {{"q_lora_rank", 0}}, kInvalid, {"q_lora_rank is 0"}},
      {kV2, {{"num_key_value_heads", 8}}, kUnimplemented, {"num_key_value_heads is 8"}},
      {kQwen,
       {{"hidden_size", 1 << 24}, {"moe_intermediate_size", 1 << 24}},
       kInvalid,
       {"parameters"}},
      {kQwen, {{"num_hidden_layers", 4096}}, kInvalid, {"4096 times 128 experts"}},
      {kQwen, {{"rms_norm_eps", 0}}, kInvalid, {"rms_norm_eps is 0"}},
      {kQwen, {{"rms_norm_eps", "1e-6"}}, kInvalid, {"rms_norm_eps is \"1e-6\""}},
  };
}

std::vector<BadCase> ExpertCases() {
  return {
      {kQwen, {{"num_experts", nullptr}}, kInvalid, {"num_experts is absent"}},
      {kQwen, {{"num_experts", 0}}, kInvalid, {"num_experts is 0"}},
      {kQwen, {{"num_local_experts", 64}}, kInvalid, {"128", "64", "two spellings"}},
      {kQwen, {{"num_experts_per_tok", 129}}, kInvalid, {"num_experts_per_tok is 129", "128"}},
      {kQwen, {{"mlp_only_layers", {48}}}, kInvalid, {"mlp_only_layers is 48"}},
      {kV2, {{"first_k_dense_replace", 28}}, kInvalid, {"first_k_dense_replace is 28"}},
      {kV2, {{"intermediate_size", nullptr}}, kInvalid, {"intermediate_size", "absent"}},
      {kV2, {{"scoring_func", "sigmoid"}}, kUnimplemented, {"scoring_func is \"sigmoid\""}},
      {kV2, {{"topk_method", "noaux_tc"}}, kUnimplemented, {"topk_method is \"noaux_tc\""}},
      {kV2,
       {{"topk_method", "group_limited_greedy"}, {"n_group", 7}},
       kInvalid,
       {"n_group is 7", "64"}},
      {kV2,
       {{"topk_method", "group_limited_greedy"}, {"n_group", 4}, {"topk_group", 5}},
       kInvalid,
       {"topk_group is 5"}},
      {kV2,
       {{"topk_method", "group_limited_greedy"}, {"n_group", 32}, {"topk_group", 2}},
       kInvalid,
       {"num_experts_per_tok is 6", "hold 4 experts"}},
  };
}

std::vector<BadCase> RopeCases() {
  return {
      {kQwen,
       {{"rope_scaling", {{"rope_type", "linear"}, {"factor", 2}}}},
       kUnimplemented,
       {"rope_scaling.rope_type is \"linear\""}},
      {kQwen,
       {{"rope_scaling", {{"type", "dynamic"}, {"factor", 2}}}},
       kUnimplemented,
       {"dynamic"}},
      {kQwen, {{"rope_scaling", {{"type", "llama3"}, {"factor", 2}}}}, kUnimplemented, {"llama3"}},
      {kQwen, {{"rope_scaling", {{"type", "longrope"}}}}, kUnimplemented, {"longrope"}},
      {kQwen,
       {{"rope_scaling", {{"type", "yarn"}, {"rope_type", "linear"}}}},
       kInvalid,
       {"yarn", "linear", "two spellings"}},
      {kQwen, {{"rope_scaling", {{"factor", 4}}}}, kInvalid, {"factor is 4", "rope_type"}},
      {kQwen, {{"rope_scaling", "yarn"}}, kInvalid, {"rope_scaling is \"yarn\""}},
      {kV2,
       {{"rope_parameters", {{"rope_type", "default"}}}},
       kInvalid,
       {"rope_parameters", "rope_scaling"}},
      {kQwen,
       {{"rope_parameters", {{"rope_theta", 10000.0}}}},
       kInvalid,
       {"rope_parameters.rope_theta is 10000", "1e+06"}},
      {kQwen,
       {{"rope_parameters", {{"partial_rotary_factor", 0.5}}}},
       kUnimplemented,
       {"partial_rotary_factor is 0.5"}},
      {kQwen,
       {{"partial_rotary_factor", 0.25}},
       kUnimplemented,
       {"config.json: partial_rotary_factor is 0.25"}},
      {kMixtral,
       {{"rope_parameters", {{"full_attention", {{"rope_theta", 1e4}}}}}},
       kUnimplemented,
       {"rope_parameters.full_attention is an object"}},
      {kQwen, {{"rope_scaling", {{"type", "yarn"}}}}, kInvalid, {"rope_scaling.factor", "absent"}},
      {kQwen,
       {{"rope_scaling", {{"type", "yarn"}, {"factor", 4}, {"mscale", 0.5}}}},
       kInvalid,
       {"mscale 0.5 and mscale_all_dim 0", "1.06931", "1.13863"}},
      {kV2,
       {{"rope_scaling", {{"type", "yarn"}, {"factor", 4}, {"mscale_all_dim", 0.5}}}},
       kInvalid,
       {"mscale 1 and mscale_all_dim 0.5", "attention_factor must say which"}},
      {kQwen, {{"rope_theta", 1.0}}, kInvalid, {"rope_theta is 1"}},
      {kQwen, {{"rope_theta", -5.0}}, kInvalid, {"rope_theta is -5"}},
      {kQwen,
       {{"rope_scaling", {{"type", "yarn"}, {"factor", 0.5}}}},
       kInvalid,
       {"rope_scaling.factor is 0.5"}},
      {kQwen,
       {{"rope_scaling", {{"type", "yarn"}, {"factor", 4}, {"beta_fast", 0.5}}}},
       kInvalid,
       {"beta_fast is 0.5"}},
      {kQwen,
       {{"rope_scaling",
         {{"type", "yarn"}, {"factor", 4}, {"original_max_position_embeddings", 2}}}},
       kInvalid,
       {"original_max_position_embeddings 2"}},
      {kV2,
       {{"original_max_position_embeddings", 8192}},
       kInvalid,
       {"rope_scaling.original_max_position_embeddings is 4096", "8192"}},
  };
}

std::vector<BadCase> TokenCases() {
  return {
      {kQwen, {{"eos_token_id", 151936}}, kInvalid, {"eos_token_id is 151936"}},
      {kQwen, {{"eos_token_id", {151645, -1}}}, kInvalid, {"eos_token_id is -1"}},
      {kQwen, {{"bos_token_id", 200000}}, kInvalid, {"bos_token_id is 200000"}},

  };
}

void ExpectRefused(const std::vector<BadCase>& cases) {
  for (const BadCase& bad : cases) {
    SCOPED_TRACE(std::string(bad.model) + " with " + bad.edits.dump());
    const absl::StatusOr<ModelConfig> config = ParseEdited(bad.model, bad.edits);
    ASSERT_FALSE(config.ok());
    EXPECT_EQ(config.status().code(), bad.code) << config.status();
    for (const char* part : bad.in_message) {
      EXPECT_THAT(std::string(config.status().message()), HasSubstr(part));
    }
    EXPECT_THAT(std::string(config.status().message()), HasSubstr("config.json: "));
  }
}

TEST(ModelConfig, RefusesFeatures) { ExpectRefused(FeatureCases()); }
TEST(ModelConfig, RefusesSizes) { ExpectRefused(SizeCases()); }
TEST(ModelConfig, RefusesExperts) { ExpectRefused(ExpertCases()); }
TEST(ModelConfig, RefusesRopes) { ExpectRefused(RopeCases()); }
TEST(ModelConfig, RefusesTokens) { ExpectRefused(TokenCases()); }

TEST(ModelConfig, RefusesWhatIsNoConfig) {
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("[]"), std::string("7"), std::string("null"),
        std::string("{\"a\": NaN}"), std::string("{\"vocab_size\": 1, \"vocab_size\": 2}"),
        std::string("{}"), std::string("\xff\xfe"), std::string(1'000'000, '[')}) {
    const absl::StatusOr<ModelConfig> config = ParseModelConfig(text);
    EXPECT_EQ(config.status().code(), kInvalid) << text.substr(0, 50);
  }
  const std::string deep = std::string(200'000, '[') + std::string(200'000, ']');
  const absl::StatusOr<ModelConfig> config =
      ParseModelConfig("{\"model_type\": \"mixtral\", \"vocab_size\": " + deep + "}");
  EXPECT_THAT(std::string(config.status().message()), HasSubstr("vocab_size is an array"));
}

TEST(ModelConfig, RefusesABadGenerationConfig) {
  const std::string config = ReadFile(ShapeFile("mixtral-8x7b"));
  for (const char* generation :
       {"{", "[]", R"({"eos_token_id": 32000})", R"({"eos_token_id": "</s>"})"}) {
    const absl::Status status = ParseModelConfig(config, generation).status();
    EXPECT_EQ(status.code(), kInvalid);
    EXPECT_THAT(std::string(status.message()), HasSubstr("generation_config.json"));
  }
}

}  // namespace
}  // namespace writescope::model
