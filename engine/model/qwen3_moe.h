// Qwen3-MoE (Qwen3MoeForCausalLM): grouped-query attention with a norm over each q and k head, many
// narrow experts, some layers dense where the config says so. No shared expert.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "engine/model/config.h"
#include "engine/model/json_reader.h"
#include "engine/model/tensor_spec.h"

namespace writescope::model {

// Fills what is the family's own; the common fields are read before, rope after.
absl::Status ReadQwen3MoeConfig(const JsonObject& json, ModelConfig& config);

std::vector<TensorSpec> Qwen3MoeTensors(const ModelConfig& config);

}  // namespace writescope::model
