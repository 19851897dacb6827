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

std::vector<BadCase> BadCases() {
  const char* mixtral = "mixtral-8x7b";
  const char* qwen = "qwen3-30b-a3b";
  const char* v2 = "deepseek-v2-lite";
  return {
      {mixtral, {{"architectures", {"LlamaForCausalLM"}}}, kUnimplemented, {"LlamaForCausalLM"}},
      {mixtral, {{"architectures", nullptr}, {"model_type", "llama"}}, kUnimplemented, {"llama"}},
      {mixtral,
       {{"architectures", {"DeepseekV4ForCausalLM"}}, {"model_type", "deepseek_v4"}},
       kUnimplemented,
       {"DeepseekV4ForCausalLM"}},
      {mixtral,
       {{"architectures", nullptr}, {"model_type", "deepseek_v4"}},
       kUnimplemented,
       {"model_type", "deepseek_v4"}},
      {mixtral, {{"model_type", "qwen3_moe"}}, kInvalid, {"MixtralForCausalLM", "qwen3_moe"}},
      {mixtral,
       {{"architectures", {"MixtralForCausalLM", "Qwen3MoeForCausalLM"}}},
       kInvalid,
       {"MixtralForCausalLM", "Qwen3MoeForCausalLM"}},
      {mixtral, {{"architectures", nullptr}, {"model_type", nullptr}}, kInvalid, {"both absent"}},
      {mixtral, {{"architectures", "MixtralForCausalLM"}}, kInvalid, {"list of strings"}},
      {mixtral, {{"sliding_window", 4096}}, kUnimplemented, {"sliding_window is 4096", "32768"}},
      {qwen, {{"use_sliding_window", true}}, kUnimplemented, {"sliding_window is 4096"}},
      {qwen,
       {{"layer_types", {"full_attention", "sliding_attention"}}},
       kUnimplemented,
       {"layer_types", "sliding_attention"}},
      {qwen, {{"attention_bias", true}}, kUnimplemented, {"attention_bias is true"}},
      {v2, {{"mlp_bias", true}}, kUnimplemented, {"mlp_bias is true"}},
      {v2, {{"attention_bias", "no"}}, kInvalid, {"attention_bias is \"no\""}},
      {qwen, {{"hidden_act", "gelu"}}, kUnimplemented, {"hidden_act is \"gelu\""}},
      {qwen,
       {{"quantization_config", {{"quant_method", "fp8"}}}},
       kUnimplemented,
       {"quantization_config", "fp8"}},
      {qwen, {{"torch_dtype", "float8"}}, kInvalid, {"torch_dtype", "float8"}},
      {qwen, {{"dtype", "float16"}}, kInvalid, {"float16", "bfloat16", "two spellings"}},
      // Sizes.
      {qwen, {{"num_hidden_layers", 0}}, kInvalid, {"num_hidden_layers is 0"}},
      {qwen, {{"num_attention_heads", -32}}, kInvalid, {"num_attention_heads is -32"}},
      {qwen, {{"hidden_size", 2048.5}}, kInvalid, {"hidden_size is 2048.5"}},
      {qwen, {{"hidden_size", "2048"}}, kInvalid, {"hidden_size is \"2048\""}},
      {qwen, {{"hidden_size", true}}, kInvalid, {"hidden_size is true"}},
      {qwen, {{"hidden_size", {1}}}, kInvalid, {"hidden_size is an array"}},
      {qwen, {{"vocab_size", 2000000000}}, kInvalid, {"vocab_size is 2000000000"}},
      {qwen, {{"vocab_size", 1e300}}, kInvalid, {"vocab_size is 1e+300"}},
      {qwen,
       {{"max_position_embeddings", uint64_t{1} << 63}},
       kInvalid,
       {"max_position_embeddings is 9223372036854775808"}},
      {qwen, {{"moe_intermediate_size", nullptr}}, kInvalid, {"moe_intermediate_size", "absent"}},
      {qwen, {{"num_key_value_heads", 5}}, kInvalid, {"num_attention_heads is 32", "5"}},
      {mixtral, {{"hidden_size", 4100}}, kInvalid, {"hidden_size is 4100", "head_dim"}},
      {qwen, {{"head_dim", 127}}, kInvalid, {"head_dim is 127"}},
      {v2, {{"qk_rope_head_dim", 63}}, kInvalid, {"qk_rope_head_dim is 63"}},
      {v2, {{"q_lora_rank", 0}}, kInvalid, {"q_lora_rank is 0"}},
      {v2, {{"num_key_value_heads", 8}}, kUnimplemented, {"num_key_value_heads is 8"}},
      {qwen,
       {{"hidden_size", 1 << 24}, {"moe_intermediate_size", 1 << 24}},
       kInvalid,
       {"parameters"}},
      {qwen, {{"num_hidden_layers", 4096}}, kInvalid, {"4096 times 128 experts"}},
      {qwen, {{"rms_norm_eps", 0}}, kInvalid, {"rms_norm_eps is 0"}},
      {qwen, {{"rms_norm_eps", "1e-6"}}, kInvalid, {"rms_norm_eps is \"1e-6\""}},
      // Experts.
      {qwen, {{"num_experts", nullptr}}, kInvalid, {"num_experts is absent"}},
      {qwen, {{"num_experts", 0}}, kInvalid, {"num_experts is 0"}},
      {qwen, {{"num_local_experts", 64}}, kInvalid, {"128", "64", "two spellings"}},
      {qwen, {{"num_experts_per_tok", 129}}, kInvalid, {"num_experts_per_tok is 129", "128"}},
      {qwen, {{"mlp_only_layers", {48}}}, kInvalid, {"mlp_only_layers is 48"}},
      {v2, {{"first_k_dense_replace", 28}}, kInvalid, {"first_k_dense_replace is 28"}},
      {v2, {{"intermediate_size", nullptr}}, kInvalid, {"intermediate_size", "absent"}},
      {v2, {{"scoring_func", "sigmoid"}}, kUnimplemented, {"scoring_func is \"sigmoid\""}},
      {v2, {{"topk_method", "noaux_tc"}}, kUnimplemented, {"topk_method is \"noaux_tc\""}},
      {v2,
       {{"topk_method", "group_limited_greedy"}, {"n_group", 7}},
       kInvalid,
       {"n_group is 7", "64"}},
      {v2,
       {{"topk_method", "group_limited_greedy"}, {"n_group", 4}, {"topk_group", 5}},
       kInvalid,
       {"topk_group is 5"}},
      {v2,
       {{"topk_method", "group_limited_greedy"}, {"n_group", 32}, {"topk_group", 2}},
       kInvalid,
       {"num_experts_per_tok is 6", "hold 4 experts"}},
      // Rope.
      {qwen,
       {{"rope_scaling", {{"rope_type", "linear"}, {"factor", 2}}}},
       kUnimplemented,
       {"rope_scaling.rope_type is \"linear\""}},
      {qwen, {{"rope_scaling", {{"type", "dynamic"}, {"factor", 2}}}}, kUnimplemented, {"dynamic"}},
      {qwen, {{"rope_scaling", {{"type", "llama3"}, {"factor", 2}}}}, kUnimplemented, {"llama3"}},
      {qwen, {{"rope_scaling", {{"type", "longrope"}}}}, kUnimplemented, {"longrope"}},
      {qwen,
       {{"rope_scaling", {{"type", "yarn"}, {"rope_type", "linear"}}}},
       kInvalid,
       {"yarn", "linear", "two spellings"}},
      {qwen, {{"rope_scaling", {{"factor", 4}}}}, kInvalid, {"factor is 4", "rope_type"}},
      {qwen, {{"rope_scaling", "yarn"}}, kInvalid, {"rope_scaling is \"yarn\""}},
      {v2,
       {{"rope_parameters", {{"rope_type", "default"}}}},
       kInvalid,
       {"rope_parameters", "rope_scaling"}},
      {qwen,
       {{"rope_parameters", {{"rope_theta", 10000.0}}}},
       kInvalid,
       {"rope_parameters.rope_theta is 10000", "1e+06"}},
      {qwen,
       {{"rope_parameters", {{"partial_rotary_factor", 0.5}}}},
       kUnimplemented,
       {"partial_rotary_factor is 0.5"}},
      {qwen, {{"rope_theta", 1.0}}, kInvalid, {"rope_theta is 1"}},
      {qwen, {{"rope_theta", -5.0}}, kInvalid, {"rope_theta is -5"}},
      {qwen,
       {{"rope_scaling", {{"type", "yarn"}, {"factor", 0.5}}}},
       kInvalid,
       {"rope_scaling.factor is 0.5"}},
      {qwen,
       {{"rope_scaling", {{"type", "yarn"}, {"factor", 4}, {"beta_fast", 0.5}}}},
       kInvalid,
       {"beta_fast is 0.5"}},
      {qwen,
       {{"rope_scaling",
         {{"type", "yarn"}, {"factor", 4}, {"original_max_position_embeddings", 2}}}},
       kInvalid,
       {"original_max_position_embeddings 2"}},
      // Tokens.
      {qwen, {{"eos_token_id", 151936}}, kInvalid, {"eos_token_id is 151936"}},
      {qwen, {{"eos_token_id", {151645, -1}}}, kInvalid, {"eos_token_id is -1"}},
      {qwen, {{"bos_token_id", 200000}}, kInvalid, {"bos_token_id is 200000"}},
  };
}

TEST(ModelConfig, RefusesWhatItCannotServe) {
  for (const BadCase& bad : BadCases()) {
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
