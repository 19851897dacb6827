#include "server/cli/model_shape.h"

#include "engine/base/units.h"

namespace writescope::cli {
namespace {

constexpr int64_t kInt4Group = 128;

int64_t AttentionParameters(const model::ModelConfig& c) {
  const int64_t hidden = c.hidden_size;
  const int64_t heads = c.num_heads;
  int64_t count = heads * c.o_head_dim() * hidden;  // Output projection.
  if (c.mla) {
    const int64_t q_width = heads * c.qk_head_dim();
    count += c.q_lora_rank > 0 ? c.q_lora_rank * (hidden + q_width + 1) : hidden * q_width;
    count += hidden * (c.kv_lora_rank + c.qk_rope_head_dim) + c.kv_lora_rank;
    count += int64_t{c.kv_lora_rank} * heads * (c.qk_nope_head_dim + c.v_head_dim);
  } else {
    count += hidden * (heads + 2 * int64_t{c.num_kv_heads}) * c.head_dim;
    if (c.qk_norm) count += 2 * int64_t{c.head_dim};
  }
  return count;
}

// A gated MLP: three matrices.
int64_t MlpParameters(int64_t hidden, int64_t width) { return 3 * hidden * width; }

int64_t Int4Bytes(int64_t experts, int64_t hidden, int64_t width) {
  const auto matrix = [](int64_t rows, int64_t columns) {
    return rows * (CeilDiv(columns, 2) + 2 * CeilDiv(columns, kInt4Group));
  };
  return experts * (2 * matrix(width, hidden) + matrix(hidden, width));
}

}  // namespace

ParameterCount CountParameters(const model::ModelConfig& config) {
  const int64_t hidden = config.hidden_size;
  const model::MoeConfig& moe = config.moe;
  ParameterCount count;
  count.rest = (config.tie_word_embeddings ? 1 : 2) * int64_t{config.vocab_size} * hidden + hidden;
  for (const bool is_moe : config.layer_is_moe) {
    count.rest += AttentionParameters(config) + 2 * hidden;
    if (!is_moe) {
      count.rest += MlpParameters(hidden, config.dense_width);
      continue;
    }
    count.rest += moe.num_experts * hidden + MlpParameters(hidden, moe.shared_width);
    count.experts += moe.num_experts * MlpParameters(hidden, moe.expert_width);
  }
  return count;
}

roofline::ModelShape ShapeOf(const model::ModelConfig& config, const std::string& name,
                             KvDtype kv_dtype, WeightFormat weights) {
  constexpr int64_t kBf16Bytes = 2;
  const ParameterCount count = CountParameters(config);
  const KvGeometry geometry = {.num_kv_heads = config.kv_heads(),
                               .k_dim = PadDim(config.k_dim()),
                               .v_dim = PadDim(config.v_dim()),
                               .value_in_key = config.value_is_key_prefix(),
                               .dtype = kv_dtype};
  roofline::ModelShape shape;
  shape.name = name;
  shape.num_layers = config.num_layers;
  shape.num_experts = config.moe.num_experts;
  shape.experts_per_token = config.moe.experts_per_token;
  shape.kv_bytes_per_token = geometry.block_bytes() / kBlockTokens * config.num_layers;
  shape.expert_weight_bytes = count.experts * kBf16Bytes;
  if (weights == WeightFormat::kInt4) {
    int64_t moe_layers = 0;
    for (const bool is_moe : config.layer_is_moe) moe_layers += is_moe ? 1 : 0;
    shape.expert_weight_bytes =
        Int4Bytes(moe_layers * config.moe.num_experts, config.hidden_size, config.moe.expert_width);
  }
  shape.weight_bytes = shape.expert_weight_bytes + count.rest * kBf16Bytes;
  return shape;
}

}  // namespace writescope::cli
