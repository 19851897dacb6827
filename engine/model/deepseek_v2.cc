#include "engine/model/deepseek_v2.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "engine/model/config_limits.h"

namespace writescope::model {
namespace {

absl::Status ReadLatentAttention(const JsonObject& json, ModelConfig& config) {
  config.mla = true;
  // A stray head_dim (configs saved by v5 carry the rope width under this name) has no meaning
  // here.
  ASSIGN_OR_RETURN(config.num_kv_heads,
                   json.IntOr({"num_key_value_heads"}, config.num_heads, kHeadsRange));
  if (config.num_kv_heads != config.num_heads) {
    return absl::UnimplementedError(absl::StrCat(
        json.FieldPath("num_key_value_heads"), " is ", config.num_kv_heads, ", not ",
        config.num_heads, " as num_attention_heads; latent attention has one key per head"));
  }
  ASSIGN_OR_RETURN(config.q_lora_rank, json.IntOr({"q_lora_rank"}, 0, kHeadDimRange));
  ASSIGN_OR_RETURN(config.kv_lora_rank, json.Int({"kv_lora_rank"}, kHeadDimRange));
  ASSIGN_OR_RETURN(config.qk_nope_head_dim, json.Int({"qk_nope_head_dim"}, kHeadDimRange));
  ASSIGN_OR_RETURN(config.qk_rope_head_dim, json.Int({"qk_rope_head_dim"}, kHeadDimRange));
  ASSIGN_OR_RETURN(config.v_head_dim, json.Int({"v_head_dim"}, kHeadDimRange));
  config.rope.dim = config.qk_rope_head_dim;
  config.rope.interleaved = true;
  config.rope.theta = 10000;
  return absl::OkStatus();
}

absl::Status ReadTopkMethod(const JsonObject& json, MoeConfig& moe) {
  ASSIGN_OR_RETURN(const std::string scoring, json.StringOr({"scoring_func"}, "softmax"));
  if (scoring != "softmax") {
    return absl::UnimplementedError(absl::StrCat(json.FieldPath("scoring_func"), " is \"", scoring,
                                                 "\"; only \"softmax\" is implemented"));
  }
  ASSIGN_OR_RETURN(const std::string method, json.StringOr({"topk_method"}, "greedy"));
  // Under "greedy" the group fields are left unread: they must not switch grouping on.
  if (method == "greedy") return absl::OkStatus();
  if (method != "group_limited_greedy") {
    return absl::UnimplementedError(
        absl::StrCat(json.FieldPath("topk_method"), " is \"", method,
                     "\"; \"greedy\" and \"group_limited_greedy\" are implemented"));
  }
  moe.topk_method = TopkMethod::kGroupLimited;
  ASSIGN_OR_RETURN(moe.num_groups, json.Int({"n_group"}, {1, moe.num_experts}));
  ASSIGN_OR_RETURN(moe.topk_groups, json.Int({"topk_group"}, {1, moe.num_groups}));
  if (moe.num_experts % moe.num_groups != 0) {
    return absl::InvalidArgumentError(absl::StrCat(json.FieldPath("n_group"), " is ",
                                                   moe.num_groups, ", which does not divide ",
                                                   moe.num_experts, " experts"));
  }
  const int reachable = moe.num_experts / moe.num_groups * moe.topk_groups;
  if (moe.experts_per_token > reachable) {
    return absl::InvalidArgumentError(absl::StrCat(
        json.FieldPath("num_experts_per_tok"), " is ", moe.experts_per_token, ", but topk_group ",
        moe.topk_groups, " of ", moe.num_groups, " groups hold ", reachable, " experts"));
  }
  return absl::OkStatus();
}

absl::Status ReadExperts(const JsonObject& json, MoeConfig& moe) {
  ASSIGN_OR_RETURN(
      moe.num_experts,
      json.Int({"n_routed_experts", "num_experts", "num_local_experts"}, kExpertsRange));
  ASSIGN_OR_RETURN(moe.experts_per_token, json.Int({"num_experts_per_tok"}, kExpertsRange));
  ASSIGN_OR_RETURN(moe.expert_width, json.Int({"moe_intermediate_size"}, kWidthRange));
  ASSIGN_OR_RETURN(moe.num_shared_experts,
                   json.IntOr({"n_shared_experts"}, 0, kSharedExpertsRange));
  moe.shared_width = moe.num_shared_experts * moe.expert_width;
  ASSIGN_OR_RETURN(moe.routed_scaling, json.PositiveDoubleOr({"routed_scaling_factor"}, 1.0));
  moe.router_in_f32 = true;
  // The authors' code either renormalises or scales, never both. (transformers' own class ignores
  // norm_topk_prob; all published V2 models have it false, where the two agree.)
  ASSIGN_OR_RETURN(const bool norm_topk_prob, json.BoolOr({"norm_topk_prob"}, false));
  if (norm_topk_prob && moe.experts_per_token > 1) {
    moe.renormalize = true;
    moe.routed_scaling = 1;
  }
  return ReadTopkMethod(json, moe);
}

}  // namespace

absl::Status ReadDeepseekV2Config(const JsonObject& json, ModelConfig& config) {
  RETURN_IF_ERROR(ReadLatentAttention(json, config));
  ASSIGN_OR_RETURN(config.rms_eps, json.PositiveDoubleOr({"rms_norm_eps"}, 1e-6));
  RETURN_IF_ERROR(ReadExperts(json, config.moe));
  ASSIGN_OR_RETURN(const int first_moe,
                   json.IntOr({"first_k_dense_replace"}, 0, {0, config.num_layers}));
  ASSIGN_OR_RETURN(const int moe_every, json.IntOr({"moe_layer_freq"}, 1, kLayersRange));
  for (int l = 0; l < config.num_layers; ++l) {
    config.layer_is_moe.push_back(l >= first_moe && l % moe_every == 0);
  }
  if (std::count(config.layer_is_moe.begin(), config.layer_is_moe.end(), false) > 0) {
    ASSIGN_OR_RETURN(config.dense_width, json.Int({"intermediate_size"}, kWidthRange));
  }
  return absl::OkStatus();
}

std::vector<TensorSpec> DeepseekV2Tensors(const ModelConfig& config) {
  const int64_t hidden = config.hidden_size;
  const int64_t q_width = int64_t{config.num_heads} * config.qk_head_dim();
  const int64_t o_width = int64_t{config.num_heads} * config.v_head_dim;
  const int64_t latent = config.kv_lora_rank;
  const int64_t kv_b_width =
      int64_t{config.num_heads} * (config.qk_nope_head_dim + config.v_head_dim);
  TensorTable table(config);
  table.AddOuter();
  for (int l = 0; l < config.num_layers; ++l) {
    table.AddLayerNorms(l);
    if (config.q_lora_rank == 0) {
      table.Add(l, TensorRole::kQProj, "self_attn.q_proj.weight", {q_width, hidden});
    } else {
      const int64_t rank = config.q_lora_rank;
      table.Add(l, TensorRole::kQAProj, "self_attn.q_a_proj.weight", {rank, hidden});
      table.Add(l, TensorRole::kQANorm, "self_attn.q_a_layernorm.weight", {rank});
      table.Add(l, TensorRole::kQBProj, "self_attn.q_b_proj.weight", {q_width, rank});
    }
    // Rows: the latent, then the rope key that all heads share.
    table.Add(l, TensorRole::kKvAProj, "self_attn.kv_a_proj_with_mqa.weight",
              {latent + config.qk_rope_head_dim, hidden});
    table.Add(l, TensorRole::kKvANorm, "self_attn.kv_a_layernorm.weight", {latent});
    // Rows, per head: qk_nope_head_dim of the key, then v_head_dim of the value.
    table.Add(l, TensorRole::kKvBProj, "self_attn.kv_b_proj.weight", {kv_b_width, latent});
    table.Add(l, TensorRole::kOProj, "self_attn.o_proj.weight", {hidden, o_width});
    if (config.layer_is_moe[l]) {
      table.AddMoe(l);
      if (config.moe.shared_width > 0) table.AddSharedMlp(l, "mlp.shared_experts.");
    } else {
      table.AddDenseMlp(l, "mlp.", config.dense_width);
    }
  }
  return table.Take();
}

}  // namespace writescope::model
