// A model's weights in device memory, in the form in which the decoder multiplies by them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/device/device.h"
#include "engine/model/config.h"
#include "engine/model/weights.h"
#include "engine/ops/ops.h"

namespace writescope::model {

struct DeviceAttentionWeights {
  const float* input_norm = nullptr;  // Vectors: float32 in device memory
  std::optional<ops::Matrix> q_proj;
  std::optional<ops::Matrix> q_a_proj;
  const float* q_a_norm = nullptr;
  std::optional<ops::Matrix> q_b_proj;
  std::optional<ops::Matrix> k_proj;
  std::optional<ops::Matrix> v_proj;
  // q_proj and what goes with it, k_proj and v_proj or kv_a_proj, as one matrix where they lie so.
  std::optional<ops::Matrix> first_proj;
  ops::Matrix o_proj;
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
  // MLA. The rope rows of q and kv_a are reordered so that pairs are (i, i + dim / 2).
  std::optional<ops::Matrix> kv_a_proj;
  const float* kv_a_norm = nullptr;
  std::vector<ops::Matrix> key_up;    // By head: [latent, nope], the transposed k_nope part of kv_b
  std::vector<ops::Matrix> value_up;  // By head: [v_head_dim, latent], the v part of kv_b
};

struct DeviceLayerWeights {
  DeviceAttentionWeights attention;
  const float* post_norm = nullptr;
  std::optional<ops::MlpWeights> dense;
  ops::Matrix router;
  std::vector<ops::MlpWeights> experts;
  std::optional<ops::MlpWeights> shared;
};

struct DeviceWeights {
  ops::Matrix embed;
  const float* final_norm = nullptr;
  ops::Matrix lm_head;
  const float* inv_freq = nullptr;
  std::vector<DeviceLayerWeights> layers;
  device::Buffer memory;

  // Bytes of device memory that Upload takes. `expert_format` is that of the routed experts; all
  // else stays as it is in the checkpoint.
  static int64_t Bytes(const ModelConfig& config, const ModelWeights& weights,
                       const ops::OpsFootprint& footprint,
                       ops::WeightFormat expert_format = ops::WeightFormat::kSource);
  // INVALID_ARGUMENT for a NaN or infinity in a weight, named by tensor and index.
  static absl::StatusOr<std::unique_ptr<DeviceWeights>> Upload(
      const ModelConfig& config, const ModelWeights& weights, ops::Ops& ops,
      ops::WeightFormat expert_format = ops::WeightFormat::kSource);
};

}  // namespace writescope::model
