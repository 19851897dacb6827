// The hyperparameters of a model, read from a Hugging Face folder and checked. What the engine does
// not implement is refused here, with the field and its value, before a weight file is opened.
// Plain values; any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/base/units.h"

namespace writescope::model {

enum class Family { kMixtral, kQwen3Moe, kDeepseekV2 };

// "mixtral", "qwen3_moe", "deepseek_v2": the model_type of config.json.
const char* FamilyName(Family family);

struct RopeConfig {
  enum class Kind { kDefault, kYarn };
  Kind kind = Kind::kDefault;
  double theta = 10000;
  int dim = 0;               // Rotated dims of a head; even.
  bool interleaved = false;  // Pairs are dims (2i, 2i+1); otherwise (i, i + dim/2).
  // YaRN only.
  double factor = 1;
  int original_max_positions = 0;
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 1;
  double mscale_all_dim = 0;
  bool truncate_range = true;  // The ramp's ends are rounded outwards to whole pairs.
  // cos and sin are multiplied by it; 1 without YaRN.
  double attention_factor = 1;

  bool operator==(const RopeConfig&) const = default;
};

enum class TopkMethod {
  kGreedy,        // The best K of all experts.
  kGroupLimited,  // First the best topk_groups groups by their best expert, then K within these.
};

struct MoeConfig {
  int num_experts = 0;
  int experts_per_token = 0;
  int expert_width = 0;
  int num_shared_experts = 0;
  int shared_width = 0;        // All shared experts together, as one MLP; 0 without any.
  bool renormalize = false;    // The chosen weights are divided by their sum.
  double routed_scaling = 1;   // Multiplies the routed experts' weights, after renormalize.
  bool router_in_f32 = false;  // Logits in f32, whatever the activation dtype.
  TopkMethod topk_method = TopkMethod::kGreedy;
  int num_groups = 1;
  int topk_groups = 1;
};

struct ModelConfig {
  Family family = Family::kMixtral;
  std::string architecture;
  int vocab_size = 0;
  int hidden_size = 0;
  int num_layers = 0;
  int num_heads = 0;
  int num_kv_heads = 0;  // num_heads under MLA.
  int head_dim = 0;      // Of q, k and v; 0 under MLA, which has the four sizes below.

  bool mla = false;
  int q_lora_rank = 0;  // 0: q_proj is one matrix.
  int kv_lora_rank = 0;
  int qk_nope_head_dim = 0;
  int qk_rope_head_dim = 0;
  int v_head_dim = 0;

  bool qk_norm = false;  // RMSNorm over each q and k head before rope, with rms_eps.
  double rms_eps = 1e-6;
  // The latent norms of MLA have their own eps, which config.json does not set.
  double q_a_norm_eps = 1e-6;
  double kv_a_norm_eps = 1e-6;
  float softmax_scale = 0;  // qk_head_dim()^-0.5, times m^2 where YaRN asks for it.
  RopeConfig rope;

  std::vector<bool> layer_is_moe;  // [num_layers]
  int dense_width = 0;             // Of the layers that are not MoE; 0 if all are.
  MoeConfig moe;

  int max_position_embeddings = 0;
  bool tie_word_embeddings = false;
  std::optional<TokenId> bos;
  std::vector<TokenId> eos_ids;  // Of generation_config.json, then config.json; may be empty.
  std::string dtype;             // "bfloat16", "float16", "float32", or empty if not said.

  // Width of one query or key head.
  int qk_head_dim() const { return mla ? qk_nope_head_dim + qk_rope_head_dim : head_dim; }
  // Width of one head's attention output.
  int o_head_dim() const { return mla ? v_head_dim : head_dim; }

  // The KV cache's geometry. MLA caches one latent row: its value is a prefix of its key.
  int kv_heads() const { return mla ? 1 : num_kv_heads; }
  int k_dim() const { return mla ? kv_lora_rank + qk_rope_head_dim : head_dim; }
  int v_dim() const { return mla ? kv_lora_rank : head_dim; }
  bool value_is_key_prefix() const { return mla; }
};

// Reads config.json and, where there is one, generation_config.json. NotFound without a
// config.json; InvalidArgument for a wrong value; Unimplemented for a right one that is not served.
absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& model_dir);

// The same from text; an empty `generation_config_json` stands for a missing file.
absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view config_json,
                                             std::string_view generation_config_json = {});

}  // namespace writescope::model
