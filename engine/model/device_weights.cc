#include "engine/model/device_weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"
#include "engine/model/rope_frequencies.h"
#include "engine/model/tensor_values.h"

namespace writescope::model {
namespace {

constexpr int64_t kAlignment = 64;

// f16 is widened: bf16 would lose bits that the checkpoint has.
ops::WeightType TypeOf(const TensorView& tensor) {
  return tensor.dtype == Dtype::kBF16 ? ops::WeightType::kBf16 : ops::WeightType::kF32;
}
int64_t ValueBytes(ops::WeightType type) { return type == ops::WeightType::kBf16 ? 2 : 4; }

// Of DummyWeights: a shape without bytes.
bool IsDummy(const TensorView& tensor) { return tensor.bytes.data() == nullptr; }

// Walks over all weights in one order, first to count bytes, then to fill them.
class Placer {
 public:
  // Counts only.
  Placer(const ops::OpsFootprint& footprint, ops::WeightFormat expert_format)
      : footprint_(footprint), expert_format_(expert_format) {}
  Placer(ops::Ops& ops, ops::WeightFormat expert_format, device::Buffer& memory)
      : footprint_(ops.footprint()),
        expert_format_(expert_format),
        fill_(&ops),
        base_(memory.data()),
        limit_bytes_(memory.size_bytes()) {}

  int64_t used_bytes() const { return used_bytes_; }

  absl::Status Vector(const TensorView& tensor, const float** out) {
    if (!tensor.present()) return absl::OkStatus();
    // A dummy's norms leave what they scale as it is.
    std::vector<float> values(static_cast<size_t>(tensor.num_elements()), 1.0F);
    if (fill_ != nullptr && !IsDummy(tensor)) {
      RETURN_IF_ERROR(CheckTensorFinite(tensor));
      ReadAsFloat(tensor, 0, values);
    }
    return Floats(values, out);
  }

  absl::Status Floats(std::span<const float> values, const float** out) {
    const int64_t count = static_cast<int64_t>(values.size());
    const int64_t size_bytes = RoundUp(ops::Ops::vector_bytes(count), kAlignment);
    if (fill_ != nullptr) {
      CHECK_LE(used_bytes_ + size_bytes, limit_bytes_);
      ASSIGN_OR_RETURN(*out, fill_->LoadVector(base_ + used_bytes_, count, values.data()));
    }
    used_bytes_ += size_bytes;
    return absl::OkStatus();
  }

  // Rows [first_row, first_row + rows) of a matrix, in the order row_of(i) if given.
  absl::Status Rows(const TensorView& tensor, int64_t first_row, int64_t rows,
                    const std::function<int64_t(int64_t)>& row_of, ops::Matrix* out,
                    ops::WeightFormat format = ops::WeightFormat::kSource) {
    const int64_t cols = tensor.shape[1];
    const ops::WeightType type = TypeOf(tensor);
    if (fill_ == nullptr) return Place(type, format, rows, cols, nullptr, out);
    if (IsDummy(tensor)) return PlaceRandom(type, format, rows, cols, out);
    const int64_t row_bytes = cols * ValueBytes(type);
    if (!row_of && tensor.dtype != Dtype::kF16) {
      return Place(type, format, rows, cols, tensor.bytes.data() + first_row * row_bytes, out);
    }
    std::vector<std::byte> values(static_cast<size_t>(rows * row_bytes));
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = row_of ? row_of(first_row + i) : first_row + i;
      ReadRow(tensor, row, type, values.data() + i * row_bytes);
    }
    return Place(type, format, rows, cols, values.data(), out);
  }

  // A matrix of a routed expert.
  absl::Status Expert(const TensorView& tensor, ops::Matrix* out) {
    if (fill_ != nullptr && !IsDummy(tensor)) RETURN_IF_ERROR(CheckTensorFinite(tensor));
    return Rows(tensor, 0, tensor.shape[0], nullptr, out, expert_format_);
  }

  absl::Status Whole(const TensorView& tensor, ops::Matrix* out,
                     const std::function<int64_t(int64_t)>& row_of = nullptr) {
    if (fill_ != nullptr && !IsDummy(tensor)) RETURN_IF_ERROR(CheckTensorFinite(tensor));
    return Rows(tensor, 0, tensor.shape[0], row_of, out);
  }

  absl::Status Optional(const TensorView& tensor, std::optional<ops::Matrix>* out,
                        const std::function<int64_t(int64_t)>& row_of = nullptr) {
    if (!tensor.present()) return absl::OkStatus();
    return Whole(tensor, &out->emplace(), row_of);
  }

  // The matrices that the layer's input is multiplied by, with q_proj the first.
  std::optional<ops::Matrix> Join(const DeviceAttentionWeights& w) const {
    if (fill_ == nullptr) return std::nullopt;
    std::vector<ops::Matrix> parts = {*w.q_proj};
    for (const auto* part : {&w.k_proj, &w.v_proj, &w.kv_a_proj}) {
      if (part->has_value()) parts.push_back(**part);
    }
    return fill_->Join(parts);
  }

  // The transpose of rows [first_row, first_row + rows): [cols, rows].
  absl::Status Transposed(const TensorView& tensor, int64_t first_row, int64_t rows,
                          ops::Matrix* out) {
    const int64_t cols = tensor.shape[1];
    const ops::WeightType type = TypeOf(tensor);
    const auto format = ops::WeightFormat::kSource;
    if (fill_ == nullptr) return Place(type, format, cols, rows, nullptr, out);
    if (IsDummy(tensor)) return PlaceRandom(type, format, cols, rows, out);
    const int64_t size = ValueBytes(type);
    std::vector<std::byte> row(static_cast<size_t>(cols * size));
    std::vector<std::byte> values(static_cast<size_t>(cols * rows * size));
    for (int64_t r = 0; r < rows; ++r) {
      ReadRow(tensor, first_row + r, type, row.data());
      for (int64_t c = 0; c < cols; ++c) {
        std::memcpy(values.data() + (c * rows + r) * size, row.data() + c * size,
                    static_cast<size_t>(size));
      }
    }
    return Place(type, format, cols, rows, values.data(), out);
  }

 private:
  static void ReadRow(const TensorView& tensor, int64_t row, ops::WeightType type, std::byte* to) {
    const int64_t cols = tensor.shape[1];
    const size_t count = static_cast<size_t>(cols);
    if (type == ops::WeightType::kBf16) {
      ReadAsBf16(tensor, row * cols, {reinterpret_cast<uint16_t*>(to), count});
    } else {
      ReadAsFloat(tensor, row * cols, {reinterpret_cast<float*>(to), count});
    }
  }

  absl::Status Place(ops::WeightType type, ops::WeightFormat format, int64_t rows, int64_t cols,
                     const std::byte* values, ops::Matrix* out) {
    const int64_t size_bytes =
        RoundUp(footprint_.matrix_bytes(type, format, rows, cols), kAlignment);
    if (fill_ != nullptr) {
      CHECK_LE(used_bytes_ + size_bytes, limit_bytes_);
      ASSIGN_OR_RETURN(*out,
                       fill_->LoadMatrix(base_ + used_bytes_, type, format, rows, cols, values));
    }
    used_bytes_ += size_bytes;
    return absl::OkStatus();
  }

  // Random values of the size that keeps activations about as large as they were.
  absl::Status PlaceRandom(ops::WeightType type, ops::WeightFormat format, int64_t rows,
                           int64_t cols, ops::Matrix* out) {
    const int64_t size_bytes =
        RoundUp(footprint_.matrix_bytes(type, format, rows, cols), kAlignment);
    CHECK_LE(used_bytes_ + size_bytes, limit_bytes_);
    const float sigma = 1.0F / std::sqrt(static_cast<float>(cols));
    ASSIGN_OR_RETURN(*out, fill_->RandomMatrix(base_ + used_bytes_, type, format, rows, cols, sigma,
                                               static_cast<uint64_t>(used_bytes_)));
    used_bytes_ += size_bytes;
    return absl::OkStatus();
  }

  const ops::OpsFootprint footprint_;
  const ops::WeightFormat expert_format_;
  ops::Ops* fill_ = nullptr;
  std::byte* base_ = nullptr;
  int64_t limit_bytes_ = 0;
  int64_t used_bytes_ = 0;
};

// Row order that turns interleaved rope pairs (2i, 2i + 1) of every head into (i, i + dim / 2). A
// head has `head_rows` rows, the last `rope_dim` of which are rotated.
std::function<int64_t(int64_t)> HalvesOrder(int64_t head_rows, int64_t rope_dim) {
  return [=](int64_t row) {
    const int64_t head = row / head_rows;
    const int64_t in_rope = row % head_rows - (head_rows - rope_dim);
    if (in_rope < 0) return row;
    const int64_t half = rope_dim / 2;
    const int64_t source = in_rope < half ? 2 * in_rope : 2 * (in_rope - half) + 1;
    return head * head_rows + head_rows - rope_dim + source;
  };
}

absl::Status PlaceMlp(const MlpWeights& from, Placer& placer, ops::MlpWeights* to) {
  RETURN_IF_ERROR(placer.Whole(from.gate, &to->gate));
  RETURN_IF_ERROR(placer.Whole(from.up, &to->up));
  return placer.Whole(from.down, &to->down);
}

absl::Status PlaceAttention(const ModelConfig& config, const AttentionWeights& from, Placer& placer,
                            DeviceAttentionWeights* to) {
  std::function<int64_t(int64_t)> q_order, kv_order;
  if (config.rope.interleaved) {
    q_order = HalvesOrder(config.qk_head_dim(), config.rope.dim);
    kv_order = HalvesOrder(config.k_dim(), config.rope.dim);
  }
  RETURN_IF_ERROR(placer.Vector(from.input_norm, &to->input_norm));
  RETURN_IF_ERROR(placer.Optional(from.q_proj, &to->q_proj, q_order));
  RETURN_IF_ERROR(placer.Optional(from.q_a_proj, &to->q_a_proj));
  RETURN_IF_ERROR(placer.Vector(from.q_a_norm, &to->q_a_norm));
  RETURN_IF_ERROR(placer.Optional(from.q_b_proj, &to->q_b_proj, q_order));
  RETURN_IF_ERROR(placer.Optional(from.k_proj, &to->k_proj));
  RETURN_IF_ERROR(placer.Optional(from.v_proj, &to->v_proj));
  if (config.mla) RETURN_IF_ERROR(placer.Optional(from.kv_a_proj, &to->kv_a_proj, kv_order));
  if (to->q_proj.has_value()) to->first_proj = placer.Join(*to);
  RETURN_IF_ERROR(placer.Whole(from.o_proj, &to->o_proj));
  RETURN_IF_ERROR(placer.Vector(from.q_norm, &to->q_norm));
  RETURN_IF_ERROR(placer.Vector(from.k_norm, &to->k_norm));
  if (!config.mla) return absl::OkStatus();
  RETURN_IF_ERROR(placer.Vector(from.kv_a_norm, &to->kv_a_norm));
  const int64_t nope = config.qk_nope_head_dim;
  const int64_t head_rows = nope + config.v_head_dim;
  to->key_up.resize(static_cast<size_t>(config.num_heads));
  to->value_up.resize(static_cast<size_t>(config.num_heads));
  for (int64_t head = 0; head < config.num_heads; ++head) {
    RETURN_IF_ERROR(placer.Transposed(from.kv_b_proj, head * head_rows, nope,
                                      &to->key_up[static_cast<size_t>(head)]));
    RETURN_IF_ERROR(placer.Rows(from.kv_b_proj, head * head_rows + nope, config.v_head_dim, nullptr,
                                &to->value_up[static_cast<size_t>(head)]));
  }
  return absl::OkStatus();
}

absl::Status PlaceLayer(const ModelConfig& config, const LayerWeights& from, Placer& placer,
                        DeviceLayerWeights* to) {
  RETURN_IF_ERROR(PlaceAttention(config, from.attention, placer, &to->attention));
  RETURN_IF_ERROR(placer.Vector(from.post_norm, &to->post_norm));
  if (from.dense.has_value()) return PlaceMlp(*from.dense, placer, &to->dense.emplace());
  RETURN_IF_ERROR(placer.Whole(from.router, &to->router));
  to->experts.resize(from.experts.size());
  for (size_t i = 0; i < from.experts.size(); ++i) {
    RETURN_IF_ERROR(placer.Expert(from.experts[i].gate, &to->experts[i].gate));
    RETURN_IF_ERROR(placer.Expert(from.experts[i].up, &to->experts[i].up));
    RETURN_IF_ERROR(placer.Expert(from.experts[i].down, &to->experts[i].down));
  }
  if (from.shared.has_value())
    RETURN_IF_ERROR(PlaceMlp(*from.shared, placer, &to->shared.emplace()));
  return absl::OkStatus();
}

absl::Status PlaceAll(const ModelConfig& config, const ModelWeights& from, Placer& placer,
                      DeviceWeights* to) {
  RETURN_IF_ERROR(placer.Whole(from.embed, &to->embed));
  RETURN_IF_ERROR(placer.Vector(from.final_norm, &to->final_norm));
  if (from.lm_head.name == from.embed.name) {
    to->lm_head = to->embed;
  } else {
    RETURN_IF_ERROR(placer.Whole(from.lm_head, &to->lm_head));
  }
  RETURN_IF_ERROR(placer.Floats(InverseFrequencies(config.rope), &to->inv_freq));
  to->layers.resize(from.layers.size());
  for (size_t layer = 0; layer < from.layers.size(); ++layer) {
    RETURN_IF_ERROR(PlaceLayer(config, from.layers[layer], placer, &to->layers[layer]));
  }
  return absl::OkStatus();
}

}  // namespace

int64_t DeviceWeights::Bytes(const ModelConfig& config, const ModelWeights& weights,
                             const ops::OpsFootprint& footprint, ops::WeightFormat expert_format) {
  Placer counter(footprint, expert_format);
  DeviceWeights unused;
  const absl::Status status = PlaceAll(config, weights, counter, &unused);
  CHECK(status.ok()) << status.ToString();
  return counter.used_bytes();
}

absl::StatusOr<std::unique_ptr<DeviceWeights>> DeviceWeights::Upload(
    const ModelConfig& config, const ModelWeights& weights, ops::Ops& ops,
    ops::WeightFormat expert_format) {
  auto result = std::make_unique<DeviceWeights>();
  const int64_t size_bytes = Bytes(config, weights, ops.footprint(), expert_format);
  ASSIGN_OR_RETURN(result->memory, ops.device().AllocateDevice(size_bytes, "weights"));
  // kv_b is placed in parts, so it is checked here, whole.
  for (const LayerWeights& layer : weights.layers) {
    if (layer.attention.kv_b_proj.present() && !IsDummy(layer.attention.kv_b_proj)) {
      RETURN_IF_ERROR(CheckTensorFinite(layer.attention.kv_b_proj));
    }
  }
  Placer filler(ops, expert_format, result->memory);
  RETURN_IF_ERROR(PlaceAll(config, weights, filler, result.get()));
  return result;
}

}  // namespace writescope::model
