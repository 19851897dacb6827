// Mixtral (MixtralForCausalLM): grouped-query attention, and in every layer 8 experts of which 2
// are chosen; their two weights are divided by their sum. No shared expert, no dense layer.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "engine/model/config.h"
#include "engine/model/json_reader.h"
#include "engine/model/tensor_spec.h"

namespace writescope::model {

// Fills what is the family's own; the common fields are read before, rope after.
absl::Status ReadMixtralConfig(const JsonObject& json, ModelConfig& config);

std::vector<TensorSpec> MixtralTensors(const ModelConfig& config);

}  // namespace writescope::model
