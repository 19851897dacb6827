// config.json: published configurations in both spellings, what may be missing, and defaults.
#include "engine/model/config.h"

#include <filesystem>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/model/tensor_spec.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/support/safetensors_writer.h"
#include "tests/support/temp_dir.h"

namespace writescope::model {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::ReadFile;
using testing_support::TempDir;
using testing_support::WriteFile;

std::string ShapeFile(const std::string& model) {
  return WRITESCOPE_DEPLOY_DIR "/model-shapes/" + model + "/config.json";
}
std::string V5File(const std::string& model) {
  return WRITESCOPE_TESTDATA_DIR "/configs/" + model + "-v5.json";
}

// The published config with fields replaced; a field whose new value is null becomes null.
absl::StatusOr<ModelConfig> ParseEdited(const std::string& model, const json& edits) {
  json config = json::parse(ReadFile(ShapeFile(model)));
  for (const auto& [key, value] : edits.items()) config[key] = value;
  return ParseModelConfig(config.dump());
}

ModelConfig MustParse(const std::string& text) {
  absl::StatusOr<ModelConfig> config = ParseModelConfig(text);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : ModelConfig();
}

ModelConfig MustParseEdited(const std::string& model, const json& edits) {
  absl::StatusOr<ModelConfig> config = ParseEdited(model, edits);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : ModelConfig();
}

void ExpectMixtral8x7B(const ModelConfig& c) {
  EXPECT_EQ(c.family, Family::kMixtral);
  EXPECT_EQ(c.architecture, "MixtralForCausalLM");
  EXPECT_EQ(c.vocab_size, 32000);
  EXPECT_EQ(c.hidden_size, 4096);
  EXPECT_EQ(c.num_layers, 32);
  EXPECT_EQ(c.num_heads, 32);
  EXPECT_EQ(c.num_kv_heads, 8);
  EXPECT_EQ(c.head_dim, 128);
  EXPECT_FALSE(c.mla);
  EXPECT_FALSE(c.qk_norm);
  EXPECT_EQ(c.rms_eps, 1e-5);
  EXPECT_FLOAT_EQ(c.softmax_scale, 0.088388348f);
  EXPECT_EQ(c.rope.kind, RopeConfig::Kind::kDefault);
  EXPECT_EQ(c.rope.theta, 1e6);
  EXPECT_EQ(c.rope.dim, 128);
  EXPECT_FALSE(c.rope.interleaved);
  EXPECT_EQ(c.rope.attention_factor, 1);
  EXPECT_EQ(c.layer_is_moe, std::vector<bool>(32, true));
  EXPECT_EQ(c.dense_width, 0);
  EXPECT_EQ(c.moe.num_experts, 8);
  EXPECT_EQ(c.moe.experts_per_token, 2);
  EXPECT_EQ(c.moe.expert_width, 14336);
  EXPECT_EQ(c.moe.shared_width, 0);
  EXPECT_TRUE(c.moe.renormalize);
  EXPECT_EQ(c.moe.routed_scaling, 1);
  EXPECT_FALSE(c.moe.router_in_f32);
  EXPECT_EQ(c.max_position_embeddings, 32768);
  EXPECT_FALSE(c.tie_word_embeddings);
  EXPECT_EQ(c.bos, 1);
  EXPECT_THAT(c.eos_ids, ElementsAre(2));
  EXPECT_EQ(c.dtype, "bfloat16");
  // Per token and layer 2 * 8 * 128 elements.
  EXPECT_EQ(std::tuple(c.kv_heads(), c.k_dim(), c.v_dim()), std::tuple(8, 128, 128));
  EXPECT_FALSE(c.value_is_key_prefix());
  EXPECT_EQ(ParameterCount(c), 46'702'792'704);
  EXPECT_EQ(ExpectedTensors(c).size(), 995u);
}

void ExpectQwen30B(const ModelConfig& c) {
  EXPECT_EQ(c.family, Family::kQwen3Moe);
  EXPECT_EQ(c.vocab_size, 151936);
  EXPECT_EQ(c.hidden_size, 2048);
  EXPECT_EQ(c.num_layers, 48);
  EXPECT_EQ(c.num_heads, 32);
  EXPECT_EQ(c.num_kv_heads, 4);
  EXPECT_EQ(c.head_dim, 128);  // Not hidden_size / num_heads, which is 64.
  EXPECT_TRUE(c.qk_norm);
  EXPECT_EQ(c.rms_eps, 1e-6);
  EXPECT_FLOAT_EQ(c.softmax_scale, 0.088388348f);
  EXPECT_EQ(c.rope.theta, 1e6);
  EXPECT_EQ(c.layer_is_moe, std::vector<bool>(48, true));
  EXPECT_EQ(c.dense_width, 0);
  EXPECT_EQ(c.moe.num_experts, 128);
  EXPECT_EQ(c.moe.experts_per_token, 8);
  EXPECT_EQ(c.moe.expert_width, 768);
  EXPECT_TRUE(c.moe.renormalize);
  EXPECT_FALSE(c.moe.router_in_f32);
  EXPECT_EQ(c.max_position_embeddings, 40960);
  EXPECT_EQ(c.bos, 151643);
  EXPECT_THAT(c.eos_ids, ElementsAre(151645));
  EXPECT_EQ(c.dtype, "bfloat16");
  EXPECT_EQ(std::tuple(c.kv_heads(), c.k_dim(), c.v_dim()), std::tuple(4, 128, 128));
  EXPECT_EQ(ParameterCount(c), 30'532'122'624);
  EXPECT_EQ(ExpectedTensors(c).size(), 18'867u);
}

void ExpectV2Lite(const ModelConfig& c) {
  EXPECT_EQ(c.family, Family::kDeepseekV2);
  EXPECT_EQ(c.vocab_size, 102400);
  EXPECT_EQ(c.hidden_size, 2048);
  EXPECT_EQ(c.num_layers, 27);
  EXPECT_EQ(c.num_heads, 16);
  EXPECT_TRUE(c.mla);
  EXPECT_EQ(c.head_dim, 0);
  EXPECT_EQ(c.q_lora_rank, 0);
  EXPECT_EQ(c.kv_lora_rank, 512);
  EXPECT_EQ(c.qk_nope_head_dim, 128);
  EXPECT_EQ(c.qk_rope_head_dim, 64);
  EXPECT_EQ(c.v_head_dim, 128);
  EXPECT_EQ(c.qk_head_dim(), 192);
  EXPECT_EQ(c.o_head_dim(), 128);
  EXPECT_EQ(c.kv_a_norm_eps, 1e-6);
  EXPECT_NEAR(c.softmax_scale, 0.1147213868, 1e-8);
  EXPECT_EQ(c.rope.kind, RopeConfig::Kind::kYarn);
  EXPECT_EQ(c.rope.theta, 10000);
  EXPECT_EQ(c.rope.dim, 64);
  EXPECT_TRUE(c.rope.interleaved);
  EXPECT_EQ(c.rope.factor, 40);
  EXPECT_EQ(c.rope.original_max_positions, 4096);
  EXPECT_EQ(c.rope.attention_factor, 1.0);
  std::vector<bool> moe_layers(27, true);
  moe_layers[0] = false;
  EXPECT_EQ(c.layer_is_moe, moe_layers);
  EXPECT_EQ(c.dense_width, 10944);
  EXPECT_EQ(c.moe.num_experts, 64);
  EXPECT_EQ(c.moe.experts_per_token, 6);
  EXPECT_EQ(c.moe.expert_width, 1408);
  EXPECT_EQ(c.moe.num_shared_experts, 2);
  EXPECT_EQ(c.moe.shared_width, 2816);
  EXPECT_FALSE(c.moe.renormalize);
  EXPECT_EQ(c.moe.routed_scaling, 1);
  EXPECT_TRUE(c.moe.router_in_f32);
  EXPECT_EQ(c.moe.topk_method, TopkMethod::kGreedy);
  EXPECT_EQ(c.max_position_embeddings, 163840);
  EXPECT_EQ(c.bos, 100000);
  EXPECT_THAT(c.eos_ids, ElementsAre(100001));
  EXPECT_EQ(std::tuple(c.kv_heads(), c.k_dim(), c.v_dim()), std::tuple(1, 576, 512));
  EXPECT_TRUE(c.value_is_key_prefix());
  EXPECT_EQ(ParameterCount(c), 15'706'484'224);
  EXPECT_EQ(ExpectedTensors(c).size(), 5'291u);
}

TEST(PublishedConfig, Mixtral8x7B) {
  ExpectMixtral8x7B(MustParse(ReadFile(ShapeFile("mixtral-8x7b"))));
  ExpectMixtral8x7B(MustParse(ReadFile(V5File("mixtral-8x7b"))));
}

TEST(PublishedConfig, Qwen3_30B_A3B) {
  ExpectQwen30B(MustParse(ReadFile(ShapeFile("qwen3-30b-a3b"))));
  ExpectQwen30B(MustParse(ReadFile(V5File("qwen3-30b-a3b"))));
}

TEST(PublishedConfig, DeepseekV2Lite) {
  ExpectV2Lite(MustParse(ReadFile(ShapeFile("deepseek-v2-lite"))));
  ExpectV2Lite(MustParse(ReadFile(V5File("deepseek-v2-lite"))));
}

TEST(ModelConfig, NullEqualsAbsent) {
  for (const char* model : {"mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite"}) {
    json config = json::parse(ReadFile(ShapeFile(model)));
    for (const char* field : {"num_key_value_heads",
                              "head_dim",
                              "rms_norm_eps",
                              "hidden_act",
                              "attention_bias",
                              "rope_scaling",
                              "rope_theta",
                              "sliding_window",
                              "tie_word_embeddings",
                              "bos_token_id",
                              "eos_token_id",
                              "norm_topk_prob",
                              "decoder_sparse_step",
                              "mlp_only_layers",
                              "n_shared_experts",
                              "topk_method",
                              "scoring_func",
                              "quantization_config",
                              "torch_dtype",
                              "use_sliding_window",
                              "routed_scaling_factor",
                              "first_k_dense_replace",
                              "moe_layer_freq",
                              "architectures"}) {
      json absent = config;
      absent.erase(field);
      json null = config;
      null[field] = nullptr;
      const ModelConfig a = MustParse(absent.dump());
      const ModelConfig b = MustParse(null.dump());
      EXPECT_EQ(a.num_kv_heads, b.num_kv_heads) << model << " " << field;
      EXPECT_EQ(a.head_dim, b.head_dim) << model << " " << field;
      EXPECT_EQ(a.rms_eps, b.rms_eps) << model << " " << field;
      EXPECT_EQ(a.softmax_scale, b.softmax_scale) << model << " " << field;
      EXPECT_EQ(a.rope.theta, b.rope.theta) << model << " " << field;
      EXPECT_EQ(a.rope.kind, b.rope.kind) << model << " " << field;
      EXPECT_EQ(a.layer_is_moe, b.layer_is_moe) << model << " " << field;
      EXPECT_EQ(a.moe.renormalize, b.moe.renormalize) << model << " " << field;
      EXPECT_EQ(a.moe.shared_width, b.moe.shared_width) << model << " " << field;
      EXPECT_EQ(a.bos, b.bos) << model << " " << field;
      EXPECT_EQ(a.eos_ids, b.eos_ids) << model << " " << field;
    }
  }
}

TEST(ModelConfig, DerivedOnlyWhereNotExplicit) {
  const ModelConfig derived = MustParseEdited("mixtral-8x7b", {{"num_key_value_heads", nullptr}});
  EXPECT_EQ(derived.num_kv_heads, 32);
  EXPECT_EQ(derived.head_dim, 128);
  EXPECT_EQ(MustParseEdited("mixtral-8x7b", {{"head_dim", 96}}).head_dim, 96);
  // Latent attention has no head_dim: a stray one changes nothing.
  ExpectV2Lite(MustParseEdited("deepseek-v2-lite", {{"head_dim", 8}}));
  EXPECT_EQ(MustParseEdited("mixtral-8x7b", {{"hidden_size", 4096.0}}).hidden_size, 4096);
}

TEST(ModelConfig, EitherNameOfTheFamilyIsEnough) {
  EXPECT_STREQ(FamilyName(Family::kMixtral), "mixtral");
  EXPECT_STREQ(FamilyName(Family::kQwen3Moe), "qwen3_moe");
  EXPECT_STREQ(FamilyName(Family::kDeepseekV2), "deepseek_v2");
  EXPECT_EQ(MustParseEdited("qwen3-30b-a3b", {{"architectures", nullptr}}).architecture,
            "Qwen3MoeForCausalLM");
  EXPECT_EQ(MustParseEdited("qwen3-30b-a3b", {{"model_type", nullptr}}).family, Family::kQwen3Moe);
}

TEST(ModelConfig, WindowThatHidesNothingIsAccepted) {
  EXPECT_TRUE(ParseEdited("mixtral-8x7b", {{"sliding_window", 32768}}).ok());
  for (const int window : {4096, 0, -1}) {  // Switched off, so it may say anything.
    EXPECT_TRUE(ParseEdited("qwen3-30b-a3b", {{"sliding_window", window}}).ok()) << window;
  }
  EXPECT_TRUE(
      ParseEdited("qwen3-30b-a3b", {{"use_sliding_window", true}, {"sliding_window", 40960}}).ok());
}

TEST(ModelConfig, DenseLayersOfQwen) {
  const ModelConfig config = MustParseEdited(
      "qwen3-30b-a3b",
      {{"num_hidden_layers", 6}, {"decoder_sparse_step", 2}, {"mlp_only_layers", {3}}});
  EXPECT_EQ(config.layer_is_moe, (std::vector<bool>{false, true, false, false, false, true}));
  EXPECT_EQ(config.dense_width, 6144);
}

TEST(ModelConfig, MoeLayerFrequencyOfDeepseek) {
  const ModelConfig config = MustParseEdited(
      "deepseek-v2-lite",
      {{"num_hidden_layers", 6}, {"moe_layer_freq", 2}, {"first_k_dense_replace", 1}});
  EXPECT_EQ(config.layer_is_moe, (std::vector<bool>{false, false, true, false, true, false}));
}

TEST(ModelConfig, FullSizeV2) {
  const ModelConfig config =
      MustParseEdited("deepseek-v2-lite", {{"q_lora_rank", 1536},
                                           {"topk_method", "group_limited_greedy"},
                                           {"n_routed_experts", 160},
                                           {"n_group", 8},
                                           {"topk_group", 3},
                                           {"routed_scaling_factor", 16.0}});
  EXPECT_EQ(config.q_lora_rank, 1536);
  EXPECT_EQ(config.moe.topk_method, TopkMethod::kGroupLimited);
  EXPECT_EQ(config.moe.num_groups, 8);
  EXPECT_EQ(config.moe.topk_groups, 3);
  EXPECT_EQ(config.moe.routed_scaling, 16);
  // q_proj becomes q_a_proj, q_a_layernorm and q_b_proj in each layer, and there are 96 experts
  // more.
  EXPECT_EQ(ExpectedTensors(config).size(), 5'291u + 27 * 2 + 26 * 96 * 3);
}

TEST(ModelConfig, GroupFieldsDoNotSwitchGroupingOn) {
  const ModelConfig config =
      MustParseEdited("deepseek-v2-lite", {{"n_group", 8}, {"topk_group", 3}});
  EXPECT_EQ(config.moe.topk_method, TopkMethod::kGreedy);
  EXPECT_EQ(config.moe.num_groups, 1);
}

TEST(ModelConfig, RenormalisedV2WeightsAreNotScaled) {
  const ModelConfig config = MustParseEdited(
      "deepseek-v2-lite", {{"norm_topk_prob", true}, {"routed_scaling_factor", 16.0}});
  EXPECT_TRUE(config.moe.renormalize);
  EXPECT_EQ(config.moe.routed_scaling, 1);
}

TEST(ModelConfig, YarnOfQwen) {
  const ModelConfig config = MustParseEdited(
      "qwen3-30b-a3b",
      {{"rope_scaling",
        {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32768}}}});
  EXPECT_EQ(config.rope.kind, RopeConfig::Kind::kYarn);
  EXPECT_NEAR(config.rope.attention_factor, 1.1386294361, 1e-9);
  EXPECT_EQ(config.max_position_embeddings, 131072);    // Though the file says 40960.
  EXPECT_FLOAT_EQ(config.softmax_scale, 0.088388348f);  // Only latent attention squares it in.
  const ModelConfig stated = MustParseEdited(
      "qwen3-30b-a3b",
      {{"rope_scaling", {{"type", "yarn"}, {"factor", 4.0}, {"attention_factor", 1.5}}}});
  EXPECT_EQ(stated.rope.attention_factor, 1.5);
  EXPECT_EQ(stated.rope.original_max_positions, 40960);
  EXPECT_EQ(stated.max_position_embeddings, 4 * 40960);
  // Without a factor it is the ratio of the two context lengths.
  const ModelConfig ratio = MustParseEdited(
      "qwen3-30b-a3b",
      {{"rope_scaling", {{"type", "yarn"}, {"original_max_position_embeddings", 10240}}}});
  EXPECT_EQ(ratio.rope.factor, 4);
  EXPECT_EQ(ratio.max_position_embeddings, 40960);
}

TEST(ModelConfig, SwishIsAnotherNameOfSilu) {
  EXPECT_TRUE(ParseEdited("mixtral-8x7b", {{"hidden_act", "swish"}}).ok());
}

TEST(ModelConfig, OriginalContextOfYarnMayStandBesideIt) {
  json edits = {{"original_max_position_embeddings", 10240},
                {"rope_scaling", {{"type", "yarn"}, {"factor", 4.0}}}};
  EXPECT_EQ(MustParseEdited("qwen3-30b-a3b", edits).rope.original_max_positions, 10240);
  edits["rope_scaling"]["original_max_position_embeddings"] = 10240;
  EXPECT_EQ(MustParseEdited("qwen3-30b-a3b", edits).rope.original_max_positions, 10240);
  edits["rope_scaling"] = {{"type", "yarn"}};  // The factor is the ratio to it, too.
  EXPECT_EQ(MustParseEdited("qwen3-30b-a3b", edits).rope.factor, 4);
}

TEST(ModelConfig, YarnStretchesTheContextAsFarAsAWindowHidesNothing) {
  for (const auto& [window, context] : {std::pair{32768, 32768}, {50000, 50000}, {70000, 65536}}) {
    const ModelConfig config = MustParseEdited(
        "mixtral-8x7b",
        {{"sliding_window", window}, {"rope_scaling", {{"type", "yarn"}, {"factor", 2.0}}}});
    EXPECT_EQ(config.max_position_embeddings, context);
  }
}

// As checkpoints have it that newer tools saved again.
TEST(ModelConfig, BothSpellingsOfRopeMayBeThereIfTheyAgree) {
  json config = json::parse(ReadFile(ShapeFile("qwen3-30b-a3b")));
  config.erase("rope_theta");
  const json yarn = {
      {"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32768}};
  config["rope_scaling"] = yarn;
  config["rope_parameters"] = yarn;
  config["rope_parameters"]["rope_theta"] = 5e6;
  const absl::StatusOr<ModelConfig> parsed = ParseModelConfig(config.dump(), "");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->rope.kind, RopeConfig::Kind::kYarn);
  EXPECT_EQ(parsed->rope.theta, 5e6);
  config["rope_scaling"]["factor"] = 2.0;
  EXPECT_EQ(ParseModelConfig(config.dump(), "").status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ModelConfig, EosOfBothFiles) {
  json config = json::parse(ReadFile(ShapeFile("qwen3-30b-a3b")));
  const auto eos = [&](const char* generation) {
    absl::StatusOr<ModelConfig> parsed = ParseModelConfig(config.dump(), generation);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return parsed.ok() ? parsed->eos_ids : std::vector<TokenId>();
  };
  EXPECT_THAT(eos(R"({"eos_token_id": [151645, 151643]})"), ElementsAre(151645, 151643));
  EXPECT_THAT(eos(R"({"eos_token_id": 151643})"), ElementsAre(151643, 151645));
  EXPECT_THAT(eos(R"({"eos_token_id": null, "temperature": 0.6})"), ElementsAre(151645));
  config["eos_token_id"] = {7, 7, 9};
  EXPECT_THAT(eos("{}"), ElementsAre(7, 9));
  config["eos_token_id"] = nullptr;
  EXPECT_THAT(eos(""), ElementsAre());
}

TEST(ReadModelConfig, FromAFolder) {
  TempDir dir;
  EXPECT_EQ(ReadModelConfig(dir.path()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadModelConfig(dir.File("nowhere")).status().code(), absl::StatusCode::kNotFound);

  WriteFile(dir.File("config.json"), ReadFile(ShapeFile("qwen3-30b-a3b")));
  WriteFile(dir.File("generation_config.json"), R"({"eos_token_id": [151645, 151643]})");
  const absl::StatusOr<ModelConfig> config = ReadModelConfig(dir.path());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->eos_ids, ElementsAre(151645, 151643));

  WriteFile(dir.File("generation_config.json"), "");
  EXPECT_EQ(ReadModelConfig(dir.path()).status().code(), absl::StatusCode::kDataLoss);
  std::filesystem::remove(dir.File("generation_config.json"));
  EXPECT_TRUE(ReadModelConfig(dir.path()).ok());

  WriteFile(dir.File("config.json"), "{}");
  EXPECT_THAT(std::string(ReadModelConfig(dir.path()).status().message()),
              HasSubstr(dir.File("config.json")));
  std::filesystem::remove(dir.File("config.json"));
  std::filesystem::create_directory(dir.File("config.json"));
  EXPECT_EQ(ReadModelConfig(dir.path()).status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace writescope::model
