// What Mixtral and Qwen3 read alike: the heads of grouped-query attention and its window.
#pragma once

#include "absl/status/status.h"
#include "engine/model/config.h"
#include "engine/model/json_reader.h"

namespace writescope::model {

// head_dim and num_kv_heads: as written, else hidden_size / num_heads and num_heads.
absl::Status ReadGroupedQueryConfig(const JsonObject& json, ModelConfig& config);

// Unimplemented if the window of Mixtral or Qwen3 would hide a token within the context that
// `config` allows.
absl::Status RefuseSlidingWindow(const JsonObject& json, const ModelConfig& config);

}  // namespace writescope::model
