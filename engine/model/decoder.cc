#include "engine/model/decoder.h"

#include <algorithm>
#include <limits>
#include <numbers>
#include <utility>

#include "engine/base/check.h"
#include "engine/base/status_macros.h"

namespace writescope::model {
namespace {

// Gives out parts of one buffer; without a base it only counts.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <typename T = void>
  T* Take(int64_t count, int64_t value_bytes) {
    std::byte* at = base_ == nullptr ? nullptr : base_ + used_bytes_;
    used_bytes_ += RoundUp(std::max<int64_t>(count, 1) * value_bytes, 64);
    return reinterpret_cast<T*>(at);
  }
  int64_t used_bytes() const { return used_bytes_; }

 private:
  std::byte* base_;
  int64_t used_bytes_ = 0;
};

struct Activations {
  void *x, *normed, *q_proj, *q_latent, *k_proj, *v_proj, *attention_out, *head_out, *gathered,
      *logits;
  float* q;
  ops::AttendState state;
};

Activations Carve(const ModelConfig& config, const KvGeometry& geometry, int activation_bytes,
                  const Decoder::Limits& limits, Carver& carver) {
  const int64_t rows = limits.max_rows;
  const int64_t heads = config.num_heads;
  const int64_t act = activation_bytes;
  Activations a;
  a.x = carver.Take(rows * config.hidden_size, act);
  a.normed = carver.Take(rows * config.hidden_size, act);
  const int64_t kv_width =
      config.mla ? int64_t{config.k_dim()} : int64_t{2} * config.num_kv_heads * config.head_dim;
  a.q_proj = carver.Take(rows * (heads * config.qk_head_dim() + kv_width), act);
  a.q_latent = carver.Take(2 * rows * config.q_lora_rank, act);
  const int64_t key_width =
      config.mla ? config.k_dim() : int64_t{config.num_kv_heads} * config.head_dim;
  a.k_proj = carver.Take(rows * key_width, act);
  a.v_proj = carver.Take(config.mla ? 0 : rows * key_width, act);
  a.attention_out = carver.Take(rows * heads * AttentionOutDim(config), act);
  a.head_out = carver.Take(config.mla ? rows * heads * config.v_head_dim : 0, act);
  a.gathered = carver.Take(int64_t{1} * limits.max_logit_rows * config.hidden_size, act);
  a.logits = carver.Take(int64_t{1} * limits.max_logit_rows * config.vocab_size, act);
  a.q = carver.Take<float>(rows * heads * geometry.k_dim, 4);
  a.state.o = carver.Take<float>(rows * heads * geometry.v_dim, 4);
  a.state.m = carver.Take<float>(rows * heads, 4);
  a.state.l = carver.Take<float>(rows * heads, 4);
  return a;
}

void* Offset(void* base, int64_t bytes) { return static_cast<std::byte*>(base) + bytes; }

}  // namespace

KvGeometry GeometryOf(const ModelConfig& config, KvDtype dtype) {
  return {.num_kv_heads = config.kv_heads(),
          .k_dim = PadDim(config.k_dim()),
          .v_dim = PadDim(config.v_dim()),
          .value_in_key = config.value_is_key_prefix(),
          .dtype = dtype};
}

int AttentionOutDim(const ModelConfig& config) { return config.v_dim(); }

ops::OpsLimits OpsLimitsOf(const ModelConfig& config, int max_tokens) {
  return {.max_tokens = max_tokens,
          .hidden = config.hidden_size,
          .max_mlp_width =
              std::max({config.dense_width, config.moe.expert_width, config.moe.shared_width}),
          .max_expert_width = config.moe.expert_width,
          .num_experts = config.moe.num_experts,
          .experts_per_token = config.moe.experts_per_token,
          .num_expert_groups = config.moe.num_groups,
          .num_heads = config.num_heads,
          .max_head_dim = std::max(config.k_dim(), config.qk_head_dim())};
}

int64_t Decoder::DeviceBytes(const ModelConfig& config, const KvGeometry& geometry,
                             int activation_bytes, const Limits& limits) {
  Carver counter(nullptr);
  Carve(config, geometry, activation_bytes, limits, counter);
  return counter.used_bytes();
}

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::Create(const ModelConfig& config,
                                                         const KvGeometry& geometry,
                                                         const DeviceWeights& weights,
                                                         ops::Ops& ops, const Limits& limits) {
  ASSIGN_OR_RETURN(
      device::Buffer memory,
      ops.device().AllocateDevice(DeviceBytes(config, geometry, ops.activation_bytes(), limits),
                                  "activations"));
  return std::unique_ptr<Decoder>(
      new Decoder(config, geometry, weights, ops, limits, std::move(memory)));
}

Decoder::Decoder(const ModelConfig& config, const KvGeometry& geometry,
                 const DeviceWeights& weights, ops::Ops& ops, const Limits& limits,
                 device::Buffer memory)
    : config_(config),
      geometry_(geometry),
      weights_(weights),
      ops_(ops),
      limits_(limits),
      memory_(std::move(memory)) {
  Carver carver(memory_.data());
  const Activations a = Carve(config, geometry, ops.activation_bytes(), limits, carver);
  x_ = a.x;
  normed_ = a.normed;
  q_proj_ = a.q_proj;
  q_latent_ = a.q_latent;
  k_proj_ = a.k_proj;
  v_proj_ = a.v_proj;
  attention_out_ = a.attention_out;
  head_out_ = a.head_out;
  gathered_ = a.gathered;
  logits_ = a.logits;
  q_ = a.q;
  state_ = a.state;
}

ops::Rope Decoder::rope() const {
  return {.inv_freq = weights_.inv_freq,
          .dim = config_.rope.dim,
          .cos_sin_scale = static_cast<float>(config_.rope.attention_factor)};
}

const float* Decoder::NormAfter(int layer) const {
  const size_t next = static_cast<size_t>(layer) + 1;  // 0 after -1
  return next < weights_.layers.size() ? weights_.layers[next].attention.input_norm
                                       : weights_.final_norm;
}

void* Decoder::HiddenRows(void* base) const {
  return Offset(base, int64_t{first_row_} * config_.hidden_size * ops_.activation_bytes());
}

float* Decoder::q() const { return q_ + int64_t{first_row_} * config_.num_heads * geometry_.k_dim; }

ops::AttendState Decoder::state() const {
  const int64_t first_head = int64_t{first_row_} * config_.num_heads;
  return {.o = state_.o + first_head * geometry_.v_dim,
          .m = state_.m + first_head,
          .l = state_.l + first_head,
          // By what the step asked for, not by the last call: a step that is replayed makes none.
          .heads = with_heads_ ? &latent_heads_ : nullptr};
}

ops::ExpertChoice Decoder::Choice(int layer) const {
  ops::ExpertChoice choice = choice_hook_ ? choice_hook_(layer) : ops::ExpertChoice();
  const int64_t skip = int64_t{first_row_} * config_.moe.experts_per_token;
  if (choice.record != nullptr) choice.record += skip;
  if (choice.replay != nullptr) choice.replay += skip;
  return choice;
}

void Decoder::Norm(const float* weight) {
  ops_.RmsNorm(num_rows_, config_.hidden_size, x(), weight, static_cast<float>(config_.rms_eps),
               normed());
}

void Decoder::SelectRows(int first_row, int num_rows) {
  CHECK_LE(first_row + num_rows, step_rows_);
  first_row_ = first_row;
  num_rows_ = num_rows;
}

void Decoder::Embed(std::span<const TokenId> tokens) {
  StartStep(static_cast<int>(tokens.size()));
  ops_.Embed(tokens, weights_.embed, x_);
  Norm(NormAfter(-1));
}

void Decoder::StartStep(int num_rows) {
  step_rows_ = num_rows;
  CHECK_LE(step_rows_, limits_.max_rows);
  SelectRows(0, step_rows_);
}

void Decoder::EmbedStaged() {
  ops_.EmbedStaged(limits_.staged_step, weights_.embed, x_);
  ops_.RmsNorm(step_rows_, config_.hidden_size, x_, NormAfter(-1),
               static_cast<float>(config_.rms_eps), normed_);
}

ops::LatentHeads Decoder::LatentHeadsOf(const DeviceAttentionWeights& w) const {
  return {.key_up = w.key_up, .value_up = w.value_up, .rope_dim = config_.qk_rope_head_dim};
}

int Decoder::LatentHeadsMinRows() const {
  if (!config_.mla) return std::numeric_limits<int>::max();
  int rows = 1;
  for (const DeviceLayerWeights& layer : weights_.layers) {
    rows = std::max(rows, ops_.LatentHeadsMinRows(geometry_, LatentHeadsOf(layer.attention)));
  }
  return rows;
}

void Decoder::BeforeAttention(int layer, std::span<const int64_t> positions,
                              std::span<const ops::KvTarget> targets) {
  BeforeAttention(layer, {.positions = positions, .targets = targets});
}

void Decoder::BeforeStagedAttention(int layer) { BeforeAttention(layer, {.staged_layer = layer}); }

void Decoder::StagedLayer(int layer) {
  BeforeStagedAttention(layer);
  ops_.AttendStaged({.step = limits_.staged_step,
                     .layer = layer,
                     .q = q(),
                     .state = state(),
                     .out_dim = AttentionOutDim(config_),
                     .out = attention_out_});
  AfterAttention(layer);
}

void Decoder::BeforeAttention(int layer, const Places& places) {
  const DeviceAttentionWeights& w = weights_.layers[static_cast<size_t>(layer)].attention;
  if (w.first_proj.has_value()) {
    ops_.Linear(num_rows_, normed(), *w.first_proj, q_proj_);
  } else if (w.q_proj.has_value()) {
    ops_.Linear(num_rows_, normed(), *w.q_proj, q_proj_);
  } else {
    void* q_latent_normed = Offset(
        q_latent_, int64_t{limits_.max_rows} * config_.q_lora_rank * ops_.activation_bytes());
    ops_.Linear(num_rows_, normed(), *w.q_a_proj, q_latent_);
    ops_.RmsNorm(num_rows_, config_.q_lora_rank, q_latent_, w.q_a_norm,
                 static_cast<float>(config_.q_a_norm_eps), q_latent_normed);
    ops_.Linear(num_rows_, q_latent_normed, *w.q_b_proj, q_proj_);
  }
  if (config_.mla) {
    BeforeMla(w, places);
  } else {
    BeforeGqa(w, places);
  }
}

void Decoder::BeforeGqa(const DeviceAttentionWeights& w, const Places& places) {
  const void* k = k_proj_;
  const void* v = v_proj_;
  int64_t stride = 0;
  if (w.first_proj.has_value()) {
    k = Offset(q_proj_, w.q_proj->rows * ops_.activation_bytes());
    v = Offset(q_proj_, (w.q_proj->rows + w.k_proj->rows) * ops_.activation_bytes());
    stride = w.first_proj->rows;
  } else {
    ops_.Linear(num_rows_, normed(), *w.k_proj, k_proj_);
    ops_.Linear(num_rows_, normed(), *w.v_proj, v_proj_);
  }
  ops_.GqaPrepare({.num_tokens = num_rows_,
                   .num_heads = config_.num_heads,
                   .head_dim = config_.head_dim,
                   .kv = geometry_,
                   .q = q_proj_,
                   .k = k,
                   .v = v,
                   .token_stride = stride,
                   .q_norm = w.q_norm,
                   .k_norm = w.k_norm,
                   .norm_eps = static_cast<float>(config_.rms_eps),
                   .rope = rope(),
                   .scale_log2 = config_.softmax_scale * std::numbers::log2e_v<float>,
                   .staged_layer = places.staged_layer,
                   .staged_step = limits_.staged_step,
                   .staged_first_row = first_row_,
                   .positions = places.positions,
                   .targets = places.targets,
                   .q_out = q()});
}

void Decoder::BeforeMla(const DeviceAttentionWeights& w, const Places& places) {
  const void* kv_a = k_proj_;
  int64_t stride = 0;
  if (w.first_proj.has_value()) {
    kv_a = Offset(q_proj_, w.q_proj->rows * ops_.activation_bytes());
    stride = w.first_proj->rows;
  } else {
    ops_.Linear(num_rows_, normed(), *w.kv_a_proj, k_proj_);
  }
  latent_heads_ = LatentHeadsOf(w);
  ops_.MlaPrepare({.num_tokens = num_rows_,
                   .num_heads = config_.num_heads,
                   .nope_dim = config_.qk_nope_head_dim,
                   .rope_dim = config_.qk_rope_head_dim,
                   .latent_dim = config_.kv_lora_rank,
                   .kv = geometry_,
                   .q = q_proj_,
                   .kv_a = kv_a,
                   .token_stride = stride,
                   .kv_norm = w.kv_a_norm,
                   .norm_eps = static_cast<float>(config_.kv_a_norm_eps),
                   .rope = rope(),
                   .scale_log2 = config_.softmax_scale * std::numbers::log2e_v<float>,
                   .key_up = w.key_up,
                   .staged_layer = places.staged_layer,
                   .staged_step = limits_.staged_step,
                   .staged_first_row = first_row_,
                   .positions = places.positions,
                   .targets = places.targets,
                   .absorb = !with_heads_,
                   .q_out = q()});
}

void Decoder::AfterAttention(int layer) {
  const DeviceLayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  const void* heads = attention_out_;
  if (config_.mla) {
    if (!with_heads_) {
      ops_.MlaOutput(num_rows_, w.attention.value_up, attention_out_, head_out_);
    }
    heads = head_out_;
  }
  ops_.Linear(num_rows_, heads, w.attention.o_proj, x(), /*accumulate=*/true);
  if (w.dense.has_value()) {
    Norm(w.post_norm);
    ops_.Mlp(num_rows_, normed(), *w.dense, x());
    Norm(NormAfter(layer));
    return;
  }
  const MoeConfig& moe = config_.moe;
  const bool grouped = moe.topk_method == TopkMethod::kGroupLimited;
  ops_.Moe({.num_tokens = num_rows_,
            .hidden = config_.hidden_size,
            .out = x(),
            .router = w.router,
            .experts = w.experts,
            .shared = w.shared.has_value() ? &*w.shared : nullptr,
            .experts_per_token = moe.experts_per_token,
            .renormalize = moe.renormalize,
            .routed_scale = static_cast<float>(moe.routed_scaling),
            .num_groups = grouped ? moe.num_groups : 1,
            .topk_groups = grouped ? moe.topk_groups : 1,
            .choice = Choice(layer),
            .first_norm = w.post_norm,
            .norm = NormAfter(layer),
            .norm_eps = static_cast<float>(config_.rms_eps),
            .normed = normed()});
}

void Decoder::Logits(std::span<const int> rows, kernels::RowMax* largest) {
  const int count = static_cast<int>(rows.size());
  CHECK_LE(count, limits_.max_logit_rows);
  ops_.GatherRows(rows, config_.hidden_size, normed_, gathered_);
  LogitsOf(count, gathered_, largest);
}

void Decoder::AllLogits(kernels::RowMax* largest) {
  CHECK_LE(step_rows_, limits_.max_logit_rows);
  LogitsOf(step_rows_, normed_, largest);
}

void Decoder::LogitsOf(int num_rows, const void* normed, kernels::RowMax* largest) {
  ops_.Linear(num_rows, normed, weights_.lm_head, logits_);
  ops_.MaxOfRows(num_rows, config_.vocab_size, logits_, largest);
}

void Decoder::DownloadLogits(int64_t first, int64_t count, float* to) {
  CHECK_LE(first + count, limits_.max_logit_rows);
  ops_.DownloadFloats(Offset(logits_, first * config_.vocab_size * ops_.activation_bytes()),
                      count * config_.vocab_size, to);
}

}  // namespace writescope::model
