#include "engine/model/qwen3_moe.h"

#include <algorithm>

#include "engine/base/status_macros.h"
#include "engine/model/config_limits.h"
#include "engine/model/grouped_query_config.h"

namespace writescope::model {

absl::Status ReadQwen3MoeConfig(const JsonObject& json, ModelConfig& config) {
  RETURN_IF_ERROR(ReadGroupedQueryConfig(json, config));
  config.qk_norm = true;
  ASSIGN_OR_RETURN(config.rms_eps, json.PositiveDoubleOr({"rms_norm_eps"}, 1e-6));

  MoeConfig& moe = config.moe;
  ASSIGN_OR_RETURN(moe.num_experts, json.Int({"num_experts", "num_local_experts"}, kExpertsRange));
  ASSIGN_OR_RETURN(moe.experts_per_token, json.Int({"num_experts_per_tok"}, kExpertsRange));
  ASSIGN_OR_RETURN(moe.expert_width, json.Int({"moe_intermediate_size"}, kWidthRange));
  ASSIGN_OR_RETURN(moe.renormalize, json.BoolOr({"norm_topk_prob"}, false));

  ASSIGN_OR_RETURN(const int sparse_step, json.IntOr({"decoder_sparse_step"}, 1, kLayersRange));
  ASSIGN_OR_RETURN(const std::vector<int> dense_layers,
                   json.IntList("mlp_only_layers", {0, config.num_layers - 1}));
  for (int l = 0; l < config.num_layers; ++l) {
    const bool listed = std::count(dense_layers.begin(), dense_layers.end(), l) > 0;
    config.layer_is_moe.push_back(!listed && (l + 1) % sparse_step == 0);
  }
  if (std::count(config.layer_is_moe.begin(), config.layer_is_moe.end(), false) > 0) {
    ASSIGN_OR_RETURN(config.dense_width, json.Int({"intermediate_size"}, kWidthRange));
  }
  config.rope.theta = 10000;
  return absl::OkStatus();
}

std::vector<TensorSpec> Qwen3MoeTensors(const ModelConfig& config) {
  TensorTable table(config);
  table.AddOuter();
  for (int l = 0; l < config.num_layers; ++l) {
    table.AddLayerNorms(l);
    table.AddGroupedQueryAttention(l);
    if (config.layer_is_moe[l]) {
      table.AddMoe(l);
    } else {
      table.AddDenseMlp(l, "mlp.", config.dense_width);
    }
  }
  return table.Take();
}

}  // namespace writescope::model
