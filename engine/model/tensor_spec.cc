#include "engine/model/tensor_spec.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/check.h"
#include "engine/model/deepseek_v2.h"
#include "engine/model/mixtral.h"
#include "engine/model/qwen3_moe.h"

namespace writescope::model {

void TensorTable::AddOuter() {
  const std::vector<int64_t> vocab_shape{config_.vocab_size, config_.hidden_size};
  specs_.push_back({TensorRole::kEmbed, -1, -1, "model.embed_tokens.weight", vocab_shape});
  specs_.push_back({TensorRole::kFinalNorm, -1, -1, "model.norm.weight", {config_.hidden_size}});
  if (!config_.tie_word_embeddings) {
    specs_.push_back({TensorRole::kLmHead, -1, -1, "lm_head.weight", vocab_shape});
  }
}

void TensorTable::Add(int layer, TensorRole role, const std::string& suffix,
                      std::vector<int64_t> shape) {
  AddExpert(layer, -1, role, suffix, std::move(shape));
}

void TensorTable::AddExpert(int layer, int expert, TensorRole role, const std::string& suffix,
                            std::vector<int64_t> shape) {
  specs_.push_back(
      {role, layer, expert, absl::StrCat("model.layers.", layer, ".", suffix), std::move(shape)});
}

void TensorTable::AddGroupedQueryAttention(int layer) {
  const int64_t hidden = config_.hidden_size;
  const int64_t q_width = int64_t{config_.num_heads} * config_.head_dim;
  const int64_t kv_width = int64_t{config_.num_kv_heads} * config_.head_dim;
  Add(layer, TensorRole::kQProj, "self_attn.q_proj.weight", {q_width, hidden});
  Add(layer, TensorRole::kKProj, "self_attn.k_proj.weight", {kv_width, hidden});
  Add(layer, TensorRole::kVProj, "self_attn.v_proj.weight", {kv_width, hidden});
  Add(layer, TensorRole::kOProj, "self_attn.o_proj.weight", {hidden, q_width});
  if (config_.qk_norm) {
    Add(layer, TensorRole::kQNorm, "self_attn.q_norm.weight", {config_.head_dim});
    Add(layer, TensorRole::kKNorm, "self_attn.k_norm.weight", {config_.head_dim});
  }
}

void TensorTable::AddLayerNorms(int layer) {
  Add(layer, TensorRole::kInputNorm, "input_layernorm.weight", {config_.hidden_size});
  Add(layer, TensorRole::kPostNorm, "post_attention_layernorm.weight", {config_.hidden_size});
}

void TensorTable::AddDenseMlp(int layer, const std::string& suffix, int width) {
  const int64_t hidden = config_.hidden_size;
  Add(layer, TensorRole::kDenseGate, suffix + "gate_proj.weight", {width, hidden});
  Add(layer, TensorRole::kDenseUp, suffix + "up_proj.weight", {width, hidden});
  Add(layer, TensorRole::kDenseDown, suffix + "down_proj.weight", {hidden, width});
}

void TensorTable::AddSharedMlp(int layer, const std::string& suffix) {
  const int64_t hidden = config_.hidden_size;
  const int64_t width = config_.moe.shared_width;
  Add(layer, TensorRole::kSharedGate, suffix + "gate_proj.weight", {width, hidden});
  Add(layer, TensorRole::kSharedUp, suffix + "up_proj.weight", {width, hidden});
  Add(layer, TensorRole::kSharedDown, suffix + "down_proj.weight", {hidden, width});
}

void TensorTable::AddMoe(int layer) {
  const MoeConfig& moe = config_.moe;
  const int64_t hidden = config_.hidden_size;
  Add(layer, TensorRole::kRouter, "mlp.gate.weight", {moe.num_experts, hidden});
  for (int e = 0; e < moe.num_experts; ++e) {
    const std::string expert = absl::StrCat("mlp.experts.", e, ".");
    AddExpert(layer, e, TensorRole::kExpertGate, expert + "gate_proj.weight",
              {moe.expert_width, hidden});
    AddExpert(layer, e, TensorRole::kExpertUp, expert + "up_proj.weight",
              {moe.expert_width, hidden});
    AddExpert(layer, e, TensorRole::kExpertDown, expert + "down_proj.weight",
              {hidden, moe.expert_width});
  }
}

std::vector<TensorSpec> ExpectedTensors(const ModelConfig& config) {
  switch (config.family) {
    case Family::kMixtral:
      return MixtralTensors(config);
    case Family::kQwen3Moe:
      return Qwen3MoeTensors(config);
    case Family::kDeepseekV2:
      return DeepseekV2Tensors(config);
  }
  CHECK(false) << "family " << static_cast<int>(config.family);
  return {};
}

int64_t ParameterCount(const ModelConfig& config) {
  int64_t count = 0;
  for (const TensorSpec& spec : ExpectedTensors(config)) {
    int64_t elements = 1;
    for (const int64_t dim : spec.shape) elements *= dim;
    count += elements;
  }
  return count;
}

}  // namespace writescope::model
