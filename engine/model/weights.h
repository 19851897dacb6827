// The weights of a model as typed views into its mapped checkpoint. Every expected tensor is there
// with the right shape and a float dtype, and none is left over: LoadWeights says which is not.
// Nothing is copied or allocated for values. Thread-safe once loaded: nothing changes.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/checkpoint.h"
#include "engine/model/config.h"
#include "engine/model/safetensors.h"
#include "engine/model/tensor_spec.h"

namespace writescope::model {

// down(silu(gate x) * (up x)).
struct MlpWeights {
  TensorView gate;  // [width, hidden]
  TensorView up;    // [width, hidden]
  TensorView down;  // [hidden, width]
};

// Views that a family does not have are not present().
struct AttentionWeights {
  TensorView input_norm;  // [hidden]; before the projections.
  TensorView q_proj;      // [heads * qk_head_dim, hidden]; absent with a q_lora_rank.
  TensorView q_a_proj;    // [q_lora_rank, hidden]
  TensorView q_a_norm;    // [q_lora_rank]
  TensorView q_b_proj;    // [heads * qk_head_dim, q_lora_rank]
  TensorView k_proj;      // [kv_heads * head_dim, hidden]
  TensorView v_proj;      // [kv_heads * head_dim, hidden]
  TensorView o_proj;      // [hidden, heads * o_head_dim]
  TensorView q_norm;      // [head_dim]
  TensorView k_norm;      // [head_dim]
  // MLA: rows of kv_a are the latent, then the rope key; rows of kv_b are, per head, k_nope then v.
  TensorView kv_a_proj;  // [kv_lora_rank + qk_rope_head_dim, hidden]
  TensorView kv_a_norm;  // [kv_lora_rank]
  TensorView kv_b_proj;  // [heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]
};

struct LayerWeights {
  AttentionWeights attention;
  TensorView post_norm;              // [hidden]; before the MLP or the experts.
  std::optional<MlpWeights> dense;   // In a layer that is not MoE.
  TensorView router;                 // [num_experts, hidden]; in a MoE layer.
  std::vector<MlpWeights> experts;   // [num_experts]; empty in a dense layer.
  std::optional<MlpWeights> shared;  // All shared experts as one MLP.
};

// Move-only; the views point into `checkpoint` and live as long as it.
struct ModelWeights {
  TensorView embed;       // [vocab, hidden]
  TensorView final_norm;  // [hidden]
  TensorView
      lm_head;  // [vocab, hidden]; the view of `embed` when tied, but for a file with another head.
  std::vector<LayerWeights> layers;

  // The tensors of the file that are in use, each once.
  std::vector<TensorView> tensors;
  Checkpoint checkpoint;
};

// Maps the checkpoint in `model_dir` and binds it to the config's tensor table. Warnings of the
// checkpoint are logged, and so is a line with the count and the dtypes.
absl::StatusOr<ModelWeights> LoadWeights(const std::string& model_dir, const ModelConfig& config);

// Views with names and shapes, and without bytes: DeviceWeights fills them with seeded random
// values. For benchmarks of a shape whose checkpoint is not at hand.
absl::StatusOr<ModelWeights> DummyWeights(const ModelConfig& config);

struct DtypeUse {
  int64_t num_tensors = 0;
  int64_t num_bytes = 0;
};
std::map<Dtype, DtypeUse> WeightDtypes(const ModelWeights& weights);
// "BF16: 83 tensors, 400000 bytes; F32: ...".
std::string DescribeDtypes(const std::map<Dtype, DtypeUse>& dtypes);
// Bytes of all tensors in use.
int64_t WeightBytes(const ModelWeights& weights);

// CheckTensorFinite (tensor_values.h) over all tensors in use.
absl::Status CheckFinite(const ModelWeights& weights);

}  // namespace writescope::model
