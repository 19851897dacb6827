#include "engine/model/grouped_query_config.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "engine/model/config_limits.h"

namespace writescope::model {
namespace {

constexpr int kQwenDefaultWindow = 4096;

}  // namespace

absl::Status ReadGroupedQueryConfig(const JsonObject& json, ModelConfig& config) {
  ASSIGN_OR_RETURN(config.num_kv_heads,
                   json.IntOr({"num_key_value_heads"}, config.num_heads, kHeadsRange));
  if (config.num_heads % config.num_kv_heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(json.FieldPath("num_attention_heads"), " is ", config.num_heads,
                     ", which is no multiple of num_key_value_heads, ", config.num_kv_heads));
  }
  ASSIGN_OR_RETURN(config.head_dim, json.IntOr({"head_dim"}, 0, kHeadDimRange));
  if (config.head_dim == 0) {
    if (config.hidden_size % config.num_heads != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(json.FieldPath("hidden_size"), " is ", config.hidden_size,
                       ", which is no multiple of num_attention_heads, ", config.num_heads,
                       ", and head_dim is not given"));
    }
    config.head_dim = config.hidden_size / config.num_heads;
    if (config.head_dim > kHeadDimRange.max) {
      return absl::InvalidArgumentError(
          absl::StrCat(json.FieldPath("hidden_size"), " ", config.hidden_size, " over ",
                       config.num_heads, " heads gives a head_dim of ", config.head_dim));
    }
  }
  config.rope.dim = config.head_dim;
  return absl::OkStatus();
}

absl::StatusOr<std::optional<int>> ReadSlidingWindow(const JsonObject& json,
                                                     const ModelConfig& config) {
  std::optional<int> fallback;
  if (config.family == Family::kQwen3Moe) {
    // Without the switch the window has no meaning, whatever it says.
    ASSIGN_OR_RETURN(const bool switched_on, json.BoolOr({"use_sliding_window"}, false));
    if (!switched_on) return fallback;
    fallback = kQwenDefaultWindow;
  }
  ASSIGN_OR_RETURN(std::optional<int> window_tokens,
                   json.OptionalInt({"sliding_window"}, kPositionsRange));
  if (!window_tokens) window_tokens = fallback;
  if (!window_tokens || *window_tokens >= config.max_position_embeddings) return window_tokens;
  return absl::UnimplementedError(absl::StrCat(
      json.FieldPath("sliding_window"), " is ", *window_tokens, ", below the context of ",
      config.max_position_embeddings,
      " tokens; attention within a window is not implemented. If the model was trained with full "
      "attention, set it to null"));
}

}  // namespace writescope::model
