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
#include "engine/kernels/elementwise.h"
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
    int staged_step = 0;     // Of ops::kStagedSteps, its own
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

  // Starts a step with the tokens' embeddings, and the norm of the first layer.
  void Embed(std::span<const TokenId> tokens);
  // Whether the layers that come attend to latents as heads of their own (ops::LatentHeads); only
  // without a hand-off to the CPU, and where every sequence has LatentHeadsMinRows rows.
  void SetLatentHeads(bool with_heads) { with_heads_ = with_heads; }
  // From so many rows of each sequence on they should; of MLA, else more than there can be.
  int LatentHeadsMinRows() const;
  // Projections, rope; writes each token's KV to its target and the queries to q().
  void BeforeAttention(int layer, std::span<const int64_t> positions,
                       std::span<const ops::KvTarget> targets);
  // Output projection and MLP or experts, each added to the residual stream; and the next norm.
  void AfterAttention(int layer);
  // After all layers: logits of the given rows of the step, and the largest of each, to page-locked
  // host memory.
  void Logits(std::span<const int> rows, kernels::RowMax* largest);
  // Of the last logits, those of rows [first, first + count), to page-locked host memory
  // [count, vocab].
  void DownloadLogits(int64_t first, int64_t count, float* to);

  // The same for the step of `num_rows` rows that is staged (Ops::StageStep). StartStep and
  // SelectRows submit nothing; what the others submit takes no arrays from the host, so that it can
  // be recorded.
  void StartStep(int num_rows);
  // From here on BeforeStagedAttention, AfterAttention, q() and state() are of these rows only:
  // those of a micro-batch, whose attention comes between. At first all rows of the step are
  // selected.
  void SelectRows(int first_row, int num_rows);
  void EmbedStaged();  // All rows
  void BeforeStagedAttention(int layer);
  void StagedLayer(int layer);               // Its attention, too
  void AllLogits(kernels::RowMax* largest);  // Of all rows

  // Of the selected rows [rows, heads, k_dim]. This, the state and what is put out are of the layer
  // that BeforeAttention was called for last: with latent heads as ops::AttendState says, and
  // v_head_dim values of a row and head.
  float* q() const;
  ops::AttendState state() const;
  // [rows, heads, AttentionOutDim]
  void* attention_out() const { return with_heads_ ? head_out_ : attention_out_; }
  int max_rows() const { return limits_.max_rows; }
  int max_logit_rows() const { return limits_.max_logit_rows; }
  void SetChoiceHook(ChoiceHook hook) { choice_hook_ = std::move(hook); }
  bool has_choice_hook() const { return choice_hook_ != nullptr; }

 private:
  Decoder(const ModelConfig& config, const KvGeometry& geometry, const DeviceWeights& weights,
          ops::Ops& ops, const Limits& limits, device::Buffer memory);
  // Where the tokens of a step are and go: given, or staged for a layer.
  struct Places {
    int staged_layer = -1;
    std::span<const int64_t> positions;
    std::span<const ops::KvTarget> targets;
  };
  void BeforeAttention(int layer, const Places& places);
  void BeforeGqa(const DeviceAttentionWeights& w, const Places& places);
  void BeforeMla(const DeviceAttentionWeights& w, const Places& places);
  ops::LatentHeads LatentHeadsOf(const DeviceAttentionWeights& w) const;
  // Of the rows in x_, what the layer after `layer` (-1: before all), or the logits, begin with.
  const float* NormAfter(int layer) const;
  // The selected rows of x_ and normed_.
  void* x() const { return HiddenRows(x_); }
  void* normed() const { return HiddenRows(normed_); }
  void* HiddenRows(void* base) const;
  ops::ExpertChoice Choice(int layer) const;
  void Norm(const float* weight);
  void LogitsOf(int num_rows, const void* normed, kernels::RowMax* largest);
  ops::Rope rope() const;

  const ModelConfig& config_;
  const KvGeometry geometry_;
  const DeviceWeights& weights_;
  ops::Ops& ops_;
  const Limits limits_;
  device::Buffer memory_;
  int step_rows_ = 0;
  int first_row_ = 0;  // The selected rows
  int num_rows_ = 0;
  ChoiceHook choice_hook_;

  // Activations, [max_rows, ...] each. x_, normed_, q_ and state_ hold the rows of the whole step;
  // the others go from one call to the next, and begin with the first of the selected rows.
  void* x_ = nullptr;         // hidden: the residual stream
  void* normed_ = nullptr;    // hidden: the norm of x_ that the next product takes
  void* q_proj_ = nullptr;    // heads * qk_head_dim; with first_proj as wide as that
  void* q_latent_ = nullptr;  // q_lora_rank, twice: before and after its norm
  void* k_proj_ = nullptr;    // kv_heads * head_dim, or the latent and rope key
  void* v_proj_ = nullptr;    // kv_heads * head_dim
  void* attention_out_ = nullptr;
  void* head_out_ = nullptr;  // MLA: heads * v_head_dim
  void* gathered_ = nullptr;  // [max_logit_rows, hidden]
  void* logits_ = nullptr;    // [max_logit_rows, vocab]
  float* q_ = nullptr;
  ops::AttendState state_;
  bool with_heads_ = false;
  ops::LatentHeads latent_heads_;  // Of the layer
};

}  // namespace writescope::model
