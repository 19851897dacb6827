// DeepSeek-V2 and V2-Lite (DeepseekV2ForCausalLM): multi-head latent attention, dense first layers,
// then routed experts beside shared ones that see every token.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "engine/model/config.h"
#include "engine/model/json_reader.h"
#include "engine/model/tensor_spec.h"

namespace writescope::model {

// Fills what is the family's own; the common fields are read before, rope after.
absl::Status ReadDeepseekV2Config(const JsonObject& json, ModelConfig& config);

std::vector<TensorSpec> DeepseekV2Tensors(const ModelConfig& config);

}  // namespace writescope::model
