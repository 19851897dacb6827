// The forward pass of every supported family, as steps on the device's compute queue around
// attention. One layer is: BeforeAttention, attention over q() into attention_out(),
// AfterAttention.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "engine/base/tile_layout.h"
#include "engine/base/units.h"
#include "engine/device/device.h"
#include "engine/model/config.h"
#include "engine/model/device_weights.h"
#include "engine/ops/ops.h"

namespace writescope::model {

// The KV cache's geometry for a model: padded dims.
KvGeometry GeometryOf(const ModelConfig& config, KvDtype dtype);
// Of a head's padded value dims, those that the model uses.
int AttentionOutDim(const ModelConfig& config);
ops::OpsLimits OpsLimitsOf(const ModelConfig& config, int max_tokens);

// Engine thread. Owns the activations of one step; two decoders may take turns on the same weights.
class Decoder {
 public:
  struct Limits {
    int max_rows = 0;        // Tokens of a step
    int max_logit_rows = 0;  // Rows of one Logits call
  };
  // For tests: which experts layer `layer` is to record or replay.
  using ChoiceHook = std::function<ops::ExpertChoice(int layer)>;

  static int64_t DeviceBytes(const ModelConfig& config, const KvGeometry& geometry,
                             int activation_bytes, const Limits& limits);
  // `config` and `weights` must outlive the decoder.
  static absl::StatusOr<std::unique_ptr<Decoder>> Create(const ModelConfig& config,
                                                         const KvGeometry& geometry,
                                                         const DeviceWeights& weights,
                                                         ops::Ops& ops, const Limits& limits);

  // Starts a step with the tokens' embeddings.
  void Embed(std::span<const TokenId> tokens);
  // Norm, projections, rope; writes each token's KV to its target and the queries to q().
  void BeforeAttention(int layer, std::span<const int64_t> positions,
                       std::span<const ops::KvTarget> targets);
  // Output projection and MLP or experts, each added to the residual stream.
  void AfterAttention(int layer);
  // Logits of the given rows of the step, to page-locked host memory [rows, vocab].
  void Logits(std::span<const int> rows, float* to);

  float* q() const { return q_; }  // [rows, heads, k_dim]
  ops::AttendState state() const { return state_; }
  void* attention_out() const { return attention_out_; }  // [rows, heads, AttentionOutDim]
  int max_rows() const { return limits_.max_rows; }
  int max_logit_rows() const { return limits_.max_logit_rows; }
  void SetChoiceHook(ChoiceHook hook) { choice_hook_ = std::move(hook); }

 private:
  Decoder(const ModelConfig& config, const KvGeometry& geometry, const DeviceWeights& weights,
          ops::Ops& ops, const Limits& limits, device::Buffer memory);
  void BeforeGqa(const DeviceAttentionWeights& w, std::span<const int64_t> positions,
                 std::span<const ops::KvTarget> targets);
  void BeforeMla(const DeviceAttentionWeights& w, std::span<const int64_t> positions,
                 std::span<const ops::KvTarget> targets);
  ops::Rope rope() const;

  const ModelConfig& config_;
  const KvGeometry geometry_;
  const DeviceWeights& weights_;
  ops::Ops& ops_;
  const Limits limits_;
  device::Buffer memory_;
  int num_rows_ = 0;
  ChoiceHook choice_hook_;

  // Activations, [max_rows, ...] each.
  void* x_ = nullptr;         // hidden: the residual stream
  void* normed_ = nullptr;    // hidden
  void* q_proj_ = nullptr;    // heads * qk_head_dim
  void* q_latent_ = nullptr;  // q_lora_rank, twice: before and after its norm
  void* k_proj_ = nullptr;    // kv_heads * head_dim, or the latent and rope key
  void* v_proj_ = nullptr;    // kv_heads * head_dim
  void* attention_out_ = nullptr;
  void* head_out_ = nullptr;  // MLA: heads * v_head_dim
  void* gathered_ = nullptr;  // [max_logit_rows, hidden], twice
  void* logits_ = nullptr;    // [max_logit_rows, vocab]
  float* q_ = nullptr;
  ops::AttendState state_;
};

}  // namespace writescope::model
