// The typed views: each holds its own tensor, in every spelling, and a wrong tensor is named.
#include "engine/model/weights.h"

#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/tensor_values.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/engine/model/checkpoint_folder.h"
#include "tests/support/safetensors_writer.h"

namespace writescope::model {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;
using testing_support::ReadFile;
using testing_support::TensorToWrite;
using testing_support::WriteFile;

const auto kInvalid = absl::StatusCode::kInvalidArgument;

int64_t Elements(const TensorView& view) {
  return std::accumulate(view.shape.begin(), view.shape.end(), int64_t{1}, std::multiplies<>());
}

void ExpectMlp(const MlpWeights& mlp, int64_t width, int64_t hidden) {
  EXPECT_THAT(mlp.gate.shape, ElementsAre(width, hidden));
  EXPECT_THAT(mlp.up.shape, ElementsAre(width, hidden));
  EXPECT_THAT(mlp.down.shape, ElementsAre(hidden, width));
  for (const TensorView* view : {&mlp.gate, &mlp.up, &mlp.down}) {
    EXPECT_EQ(view->num_elements(), Elements(*view));
  }
}

TEST(LoadWeights, GoldensLoad) {
  for (const std::string& name : kGoldens) {
    SCOPED_TRACE(name);
    const absl::StatusOr<ModelConfig> config = ReadModelConfig(GoldenDir(name));
    ASSERT_TRUE(config.ok()) << config.status();
    const absl::StatusOr<ModelWeights> weights = LoadWeights(GoldenDir(name), *config);
    ASSERT_TRUE(weights.ok()) << weights.status();
    EXPECT_EQ(weights->tensors.size(), ExpectedTensors(*config).size());
    EXPECT_EQ(WeightBytes(*weights), ParameterCount(*config) * 2);
    EXPECT_EQ(DescribeDtypes(WeightDtypes(*weights)),
              "BF16: " + std::to_string(weights->tensors.size()) + " tensors, " +
                  std::to_string(WeightBytes(*weights)) + " bytes");
    EXPECT_TRUE(CheckFinite(*weights).ok());
    // golden.safetensors lies beside the checkpoint.
    ASSERT_THAT(weights->checkpoint.warnings(), SizeIs(1));
    EXPECT_THAT(weights->checkpoint.warnings()[0], HasSubstr("golden.safetensors"));

    ASSERT_EQ(std::ssize(weights->layers), config->num_layers);
    for (int l = 0; l < config->num_layers; ++l) {
      const LayerWeights& layer = weights->layers[l];
      EXPECT_TRUE(layer.attention.input_norm.present() && layer.attention.o_proj.present());
      EXPECT_TRUE(layer.post_norm.present());
      EXPECT_EQ(layer.attention.k_proj.present(), !config->mla);
      EXPECT_EQ(layer.attention.kv_b_proj.present(), config->mla);
      EXPECT_EQ(layer.attention.q_norm.present(), config->qk_norm);
      EXPECT_EQ(layer.dense.has_value(), !config->layer_is_moe[l]);
      EXPECT_EQ(layer.router.present(), config->layer_is_moe[l]);
      EXPECT_EQ(layer.shared.has_value(), config->layer_is_moe[l] && config->moe.shared_width > 0);
      if (layer.dense) ExpectMlp(*layer.dense, config->dense_width, config->hidden_size);
      if (layer.shared) ExpectMlp(*layer.shared, config->moe.shared_width, config->hidden_size);
      ASSERT_EQ(std::ssize(layer.experts), config->layer_is_moe[l] ? config->moe.num_experts : 0);
      for (const MlpWeights& expert : layer.experts) {
        ExpectMlp(expert, config->moe.expert_width, config->hidden_size);
      }
    }
  }
}

// Tensors of one shape would change places without an error.
TEST(LoadWeights, EachViewHoldsItsOwnTensor) {
  for (const std::string& golden : kGoldens) {
    const absl::StatusOr<ModelConfig> config = ReadModelConfig(GoldenDir(golden));
    const absl::StatusOr<ModelWeights> weights = LoadWeights(GoldenDir(golden), *config);
    ASSERT_TRUE(weights.ok()) << weights.status();
    EXPECT_EQ(weights->lm_head.name, "lm_head.weight");
    EXPECT_EQ(weights->embed.name, "model.embed_tokens.weight");
    EXPECT_EQ(weights->final_norm.name, "model.norm.weight");
    const bool mixtral = config->family == Family::kMixtral;
    const std::string moe = mixtral ? "block_sparse_moe." : "mlp.";
    const LayerWeights& layer = weights->layers[1];
    const AttentionWeights& attention = layer.attention;
    const MlpWeights& expert = layer.experts[2];
    std::vector<std::pair<const TensorView*, std::string>> want{
        {&attention.input_norm, "input_layernorm"},
        {&attention.q_proj, "self_attn.q_proj"},
        {&attention.o_proj, "self_attn.o_proj"},
        {&layer.post_norm, "post_attention_layernorm"},
        {&layer.router, moe + "gate"},
        {&expert.gate, moe + "experts.2." + (mixtral ? "w1" : "gate_proj")},
        {&expert.up, moe + "experts.2." + (mixtral ? "w3" : "up_proj")},
        {&expert.down, moe + "experts.2." + (mixtral ? "w2" : "down_proj")}};
    if (config->mla) {
      want.push_back({&attention.kv_a_proj, "self_attn.kv_a_proj_with_mqa"});
      want.push_back({&attention.kv_a_norm, "self_attn.kv_a_layernorm"});
      want.push_back({&attention.kv_b_proj, "self_attn.kv_b_proj"});
      want.push_back({&layer.shared->gate, "mlp.shared_experts.gate_proj"});
      want.push_back({&layer.shared->up, "mlp.shared_experts.up_proj"});
      want.push_back({&layer.shared->down, "mlp.shared_experts.down_proj"});
    } else {
      want.push_back({&attention.k_proj, "self_attn.k_proj"});
      want.push_back({&attention.v_proj, "self_attn.v_proj"});
    }
    if (config->qk_norm) {
      want.push_back({&attention.q_norm, "self_attn.q_norm"});
      want.push_back({&attention.k_norm, "self_attn.k_norm"});
    }
    for (const auto& [view, suffix] : want) {
      EXPECT_EQ(view->name, "model.layers.1." + suffix + ".weight") << golden;
    }
    if (config->layer_is_moe[0]) continue;
    const MlpWeights& dense = *weights->layers[0].dense;
    EXPECT_EQ(dense.gate.name, "model.layers.0.mlp.gate_proj.weight");
    EXPECT_EQ(dense.up.name, "model.layers.0.mlp.up_proj.weight");
    EXPECT_EQ(dense.down.name, "model.layers.0.mlp.down_proj.weight");
  }
}

TEST(LoadWeights, ViewsSurviveAMove) {
  Folder folder("qwen3_moe");
  folder.WriteShards();
  absl::StatusOr<ModelWeights> loaded = folder.Load();
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const ModelWeights moved = *std::move(loaded);
  EXPECT_TRUE(CheckFinite(moved).ok());
  const std::string& want = folder.Tensor("model.norm.weight").bytes;
  ASSERT_EQ(moved.final_norm.bytes.size(), want.size());
  EXPECT_EQ(std::memcmp(moved.final_norm.bytes.data(), want.data(), want.size()), 0);
}

TEST(LoadWeights, TensorsMustBeTheModels) {
  const std::string q_proj = "model.layers.0.self_attn.q_proj.weight";
  {
    Folder folder("qwen3_moe");
    folder.Drop(q_proj);
    folder.WriteSingle();
    folder.ExpectRefused(kInvalid, {"1 tensors missing (" + q_proj + ")"});
  }
  {
    Folder folder("qwen3_moe");
    folder.tensors.push_back(
        {"model.layers.0.self_attn.q_proj.bias", "BF16", {128}, std::string(256, '\0')});
    folder.WriteSingle();
    folder.ExpectRefused(kInvalid, {"1 tensors not known", "q_proj.bias"});
  }
  {
    Folder folder("qwen3_moe");  // Right size, wrong order of dims.
    std::swap(folder.Tensor(q_proj).shape[0], folder.Tensor(q_proj).shape[1]);
    folder.WriteSingle();
    folder.ExpectRefused(kInvalid, {q_proj, "[64, 128]", "[128, 64]"});
  }
  {
    Folder folder("qwen3_moe");
    folder.Tensor(q_proj).dtype = "I16";
    folder.WriteSingle();
    folder.ExpectRefused(absl::StatusCode::kUnimplemented, {q_proj, "I16", "BF16, F16 or F32"});
  }
  {
    Folder folder("qwen3_moe");  // One layer more than the config says.
    json config = json::parse(ReadFile(folder.dir.File("config.json")));
    config["num_hidden_layers"] = 1;
    WriteFile(folder.dir.File("config.json"), config.dump());
    folder.WriteSingle();
    folder.ExpectRefused(kInvalid, {"33 tensors not known", "model.layers.1.", ", ...)"});
  }
  {
    Folder folder("qwen3_moe");  // Untied, so the head must be there.
    folder.Drop("lm_head.weight");
    folder.WriteSingle();
    folder.ExpectRefused(kInvalid, {"missing (lm_head.weight)"});
  }
}

TEST(LoadWeights, OldRotaryBuffersAreLeftUnread) {
  Folder folder("mixtral");
  folder.tensors.push_back(
      {"model.layers.1.self_attn.rotary_emb.inv_freq", "F32", {8}, std::string(32, '\0')});
  folder.WriteSingle();
  const absl::StatusOr<ModelWeights> weights = folder.Load();
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->tensors.size(), folder.tensors.size() - 1);
}

// transformers writes them so where n_shared_experts is 0.
TEST(LoadWeights, TensorsWithoutElementsAreLeftUnread) {
  Folder folder("deepseek_v2_plain");
  json config = json::parse(ReadFile(folder.dir.File("config.json")));
  config["n_shared_experts"] = 0;
  WriteFile(folder.dir.File("config.json"), config.dump());
  size_t emptied = 0;
  for (TensorToWrite& tensor : folder.tensors) {
    if (tensor.name.find(".mlp.shared_experts.") == std::string::npos) continue;
    tensor.shape[tensor.name.find("down_proj") == std::string::npos ? 0 : 1] = 0;
    tensor.bytes.clear();
    ++emptied;
  }
  EXPECT_GT(emptied, 0u);
  folder.WriteSingle();
  const absl::StatusOr<ModelWeights> weights = folder.Load();
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->tensors.size(), folder.tensors.size() - emptied);
  EXPECT_FALSE(weights->layers[1].shared.has_value());
}

// What was loaded, and the log's warnings about the head.
struct TiedLoad {
  absl::StatusOr<ModelWeights> weights;
  size_t warnings = 0;
};

TiedLoad LoadTied(Folder& folder) {
  folder.WriteSingle();
  testing::internal::CaptureStderr();
  TiedLoad loaded{folder.Load()};
  const std::string log = testing::internal::GetCapturedStderr();
  const std::string warning = "lm_head.weight is in the checkpoint and is not equal to model.embed";
  for (size_t at = log.find(warning); at != std::string::npos; at = log.find(warning, at + 1)) {
    ++loaded.warnings;
  }
  EXPECT_TRUE(loaded.weights.ok()) << loaded.weights.status();
  return loaded;
}

TEST(LoadWeights, TiedHead) {
  Folder folder("qwen3_moe");
  json config = json::parse(ReadFile(folder.dir.File("config.json")));
  config["tie_word_embeddings"] = true;
  WriteFile(folder.dir.File("config.json"), config.dump());
  {
    const TiedLoad loaded = LoadTied(folder);  // Another head: it is used, and that is said once.
    EXPECT_EQ(loaded.weights->lm_head.name, "lm_head.weight");
    EXPECT_NE(loaded.weights->lm_head.bytes.data(), loaded.weights->embed.bytes.data());
    EXPECT_EQ(loaded.weights->tensors.size(), folder.tensors.size());
    EXPECT_EQ(loaded.warnings, 1u);
  }
  TensorToWrite& head = folder.Tensor("lm_head.weight");
  head.bytes = folder.Tensor("model.embed_tokens.weight").bytes;
  {
    const TiedLoad loaded = LoadTied(folder);  // The same head: one of the two is kept.
    EXPECT_EQ(loaded.weights->lm_head.name, "model.embed_tokens.weight");
    EXPECT_EQ(loaded.weights->tensors.size(), folder.tensors.size() - 1);
    EXPECT_EQ(loaded.warnings, 0u);
  }
  head.bytes.back() ^= 1;
  EXPECT_EQ(LoadTied(folder).warnings, 1u);
  for (const char* other : {"model.embed_tokens.weight", "lm_head.weight"}) {
    const TensorToWrite dropped = folder.Tensor(other);
    folder.Drop(other);
    const TiedLoad loaded = LoadTied(folder);
    EXPECT_EQ(loaded.weights->lm_head.bytes.data(), loaded.weights->embed.bytes.data());
    EXPECT_EQ(loaded.weights->tensors.size(), folder.tensors.size());
    EXPECT_EQ(loaded.warnings, 0u);
    folder.tensors.push_back(dropped);
  }
}

TEST(LoadWeights, DtypesMayBeMixed) {
  Folder folder("mixtral");
  const absl::StatusOr<SafetensorsFile> golden =
      SafetensorsFile::Open(GoldenDir("mixtral") + "/model.safetensors");
  const TensorView* norm = golden->Find("model.norm.weight");
  std::vector<float> values(64);
  ReadAsFloat(*norm, 0, values);
  folder.Tensor("model.norm.weight") =
      testing_support::FloatTensor("model.norm.weight", "F32", {64}, values);
  folder.Tensor("model.layers.0.input_layernorm.weight").dtype = "F16";
  folder.WriteSingle();
  const absl::StatusOr<ModelWeights> weights = folder.Load();
  ASSERT_TRUE(weights.ok()) << weights.status();
  const auto dtypes = WeightDtypes(*weights);
  EXPECT_EQ(dtypes.at(Dtype::kF32).num_tensors, 1);
  EXPECT_EQ(dtypes.at(Dtype::kF32).num_bytes, 256);
  EXPECT_EQ(dtypes.at(Dtype::kF16).num_tensors, 1);
  std::vector<float> loaded(64);
  ReadAsFloat(weights->final_norm, 0, loaded);
  EXPECT_EQ(loaded, values);
}

TEST(CheckFinite, NamesTensorAndIndex) {
  Folder folder("deepseek_v2_yarn");
  const std::string name = "model.layers.1.mlp.experts.3.up_proj.weight";  // [32, 64]
  const uint16_t nan_bits = 0x7fc0;
  std::memcpy(folder.Tensor(name).bytes.data() + 2 * (5 * 64 + 7), &nan_bits, 2);
  folder.WriteSingle();
  const absl::StatusOr<ModelWeights> weights = folder.Load();
  ASSERT_TRUE(weights.ok()) << weights.status();
  const absl::Status status = CheckFinite(*weights);
  EXPECT_EQ(status.code(), kInvalid);
  EXPECT_EQ(status.message(), "weight " + name + " is NaN at [5, 7]");
}

// Rewrites a checkpoint as transformers 5 holds it in memory: one tensor for gate and up of all
// experts of a layer, one for down, all under "mlp.".
void Fuse(Folder& folder, const ModelConfig& config, bool mixtral) {
  const std::string moe = mixtral ? "block_sparse_moe." : "mlp.";
  const std::string names[3] = {mixtral ? "w1" : "gate_proj", mixtral ? "w3" : "up_proj",
                                mixtral ? "w2" : "down_proj"};
  const int64_t experts = config.moe.num_experts;
  const int64_t width = config.moe.expert_width;
  for (int l = 0; l < config.num_layers; ++l) {
    if (!config.layer_is_moe[l]) continue;
    const std::string layer = "model.layers." + std::to_string(l) + ".";
    folder.Tensor(layer + moe + "gate.weight").name = layer + "mlp.gate.weight";
    TensorToWrite gate_up{
        layer + "mlp.experts.gate_up_proj", "BF16", {experts, 2 * width, config.hidden_size}, {}};
    TensorToWrite down{
        layer + "mlp.experts.down_proj", "BF16", {experts, config.hidden_size, width}, {}};
    for (int e = 0; e < experts; ++e) {
      const std::string expert = layer + moe + "experts." + std::to_string(e) + ".";
      for (int part = 0; part < 3; ++part) {
        const std::string name = expert + names[part] + ".weight";
        (part < 2 ? gate_up : down).bytes += folder.Tensor(name).bytes;
        folder.Drop(name);
      }
    }
    folder.tensors.push_back(gate_up);
    folder.tensors.push_back(down);
  }
}

TEST(LoadWeights, FusedExpertsEqualSeparateOnes) {
  for (const std::string& name : kGoldens) {
    SCOPED_TRACE(name);
    const absl::StatusOr<ModelConfig> config = ReadModelConfig(GoldenDir(name));
    const absl::StatusOr<ModelWeights> want = LoadWeights(GoldenDir(name), *config);
    Folder folder(name);
    Fuse(folder, *config, config->family == Family::kMixtral);
    folder.WriteSingle();
    const absl::StatusOr<ModelWeights> got = folder.Load();
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_LT(got->tensors.size(), want->tensors.size());
    EXPECT_EQ(WeightBytes(*got), WeightBytes(*want));
    for (int l = 0; l < config->num_layers; ++l) {
      ASSERT_EQ(got->layers[l].experts.size(), want->layers[l].experts.size());
      for (size_t e = 0; e < want->layers[l].experts.size(); ++e) {
        for (TensorView MlpWeights::*part :
             {&MlpWeights::gate, &MlpWeights::up, &MlpWeights::down}) {
          const TensorView& a = got->layers[l].experts[e].*part;
          const TensorView& b = want->layers[l].experts[e].*part;
          EXPECT_EQ(a.shape, b.shape);
          ASSERT_EQ(a.bytes.size(), b.bytes.size());
          EXPECT_EQ(std::memcmp(a.bytes.data(), b.bytes.data(), a.bytes.size()), 0) << b.name;
        }
      }
    }
  }
}

TEST(LoadWeights, BothSpellingsAtOnceAreRefused) {
  const absl::StatusOr<ModelConfig> config = ReadModelConfig(GoldenDir("qwen3_moe"));
  Folder folder("qwen3_moe");
  const std::vector<TensorToWrite> separate = folder.tensors;
  Fuse(folder, *config, false);
  for (const TensorToWrite& tensor : separate) {
    if (tensor.name.find("experts.") != std::string::npos) folder.tensors.push_back(tensor);
  }
  folder.WriteSingle();
  folder.ExpectRefused(kInvalid, {"not known", "gate_up_proj"});
}

TEST(LoadWeights, FullSizeV2QueryPath) {
  const absl::StatusOr<ModelConfig> plain = ReadModelConfig(GoldenDir("deepseek_v2_plain"));
  Folder folder("deepseek_v2_plain");
  json config = json::parse(ReadFile(folder.dir.File("config.json")));
  config["q_lora_rank"] = 24;
  WriteFile(folder.dir.File("config.json"), config.dump());
  for (int l = 0; l < plain->num_layers; ++l) {
    const std::string attention = "model.layers." + std::to_string(l) + ".self_attn.";
    folder.Drop(attention + "q_proj.weight");
    folder.tensors.push_back(
        {attention + "q_a_proj.weight", "BF16", {24, 64}, std::string(24 * 64 * 2, '\0')});
    folder.tensors.push_back(
        {attention + "q_a_layernorm.weight", "BF16", {24}, std::string(24 * 2, '\0')});
    folder.tensors.push_back(
        {attention + "q_b_proj.weight", "BF16", {96, 24}, std::string(96 * 24 * 2, '\0')});
  }
  folder.WriteSingle();
  const absl::StatusOr<ModelWeights> weights = folder.Load();
  ASSERT_TRUE(weights.ok()) << weights.status();
  const AttentionWeights& attention = weights->layers[2].attention;
  EXPECT_FALSE(attention.q_proj.present());
  EXPECT_EQ(attention.q_a_proj.name, "model.layers.2.self_attn.q_a_proj.weight");
  EXPECT_EQ(attention.q_a_norm.name, "model.layers.2.self_attn.q_a_layernorm.weight");
  EXPECT_EQ(attention.q_b_proj.name, "model.layers.2.self_attn.q_b_proj.weight");
  EXPECT_THAT(attention.q_b_proj.shape, ElementsAre(96, 24));
}

}  // namespace
}  // namespace writescope::model
