#include "engine/model/mixtral.h"

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "engine/model/config_limits.h"
#include "engine/model/grouped_query_config.h"

namespace writescope::model {

absl::Status ReadMixtralConfig(const JsonObject& json, ModelConfig& config) {
  RETURN_IF_ERROR(ReadGroupedQueryConfig(json, config));
  ASSIGN_OR_RETURN(config.rms_eps, json.PositiveDoubleOr({"rms_norm_eps"}, 1e-5));

  MoeConfig& moe = config.moe;
  ASSIGN_OR_RETURN(moe.num_experts, json.Int({"num_local_experts", "num_experts"}, kExpertsRange));
  ASSIGN_OR_RETURN(moe.experts_per_token, json.Int({"num_experts_per_tok"}, kExpertsRange));
  ASSIGN_OR_RETURN(moe.expert_width, json.Int({"intermediate_size"}, kWidthRange));
  moe.renormalize = true;
  config.layer_is_moe.assign(config.num_layers, true);
  config.rope.theta = 1e6;
  return absl::OkStatus();
}

std::vector<TensorSpec> MixtralTensors(const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  const int64_t hidden = config.hidden_size;
  TensorTable table(config);
  table.AddOuter();
  for (int l = 0; l < config.num_layers; ++l) {
    table.AddLayerNorms(l);
    table.AddGroupedQueryAttention(l);
    table.Add(l, TensorRole::kRouter, "block_sparse_moe.gate.weight", {moe.num_experts, hidden});
    for (int e = 0; e < moe.num_experts; ++e) {
      const std::string expert = absl::StrCat("block_sparse_moe.experts.", e, ".");
      table.AddExpert(l, e, TensorRole::kExpertGate, expert + "w1.weight",
                      {moe.expert_width, hidden});
      table.AddExpert(l, e, TensorRole::kExpertUp, expert + "w3.weight",
                      {moe.expert_width, hidden});
      table.AddExpert(l, e, TensorRole::kExpertDown, expert + "w2.weight",
                      {hidden, moe.expert_width});
    }
  }
  return table.Take();
}

}  // namespace writescope::model
