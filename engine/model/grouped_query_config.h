// What Mixtral and Qwen3 read alike: the heads of grouped-query attention and its window.
#pragma once

#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/config.h"
#include "engine/model/json_reader.h"

namespace writescope::model {

// head_dim and num_kv_heads: as written, else hidden_size / num_heads and num_heads.
absl::Status ReadGroupedQueryConfig(const JsonObject& json, ModelConfig& config);

// Of the attention of Mixtral or Qwen3, in tokens; nothing where it sees all. Unimplemented for one
// below max_position_embeddings.
absl::StatusOr<std::optional<int>> ReadSlidingWindow(const JsonObject& json,
                                                     const ModelConfig& config);

}  // namespace writescope::model
