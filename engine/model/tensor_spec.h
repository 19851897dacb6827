// The list of weight tensors that a model of a given configuration has: names as checkpoints write
// them, shapes, and the part that each plays in the forward pass.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/config.h"

namespace writescope::model {

enum class TensorRole {
  kEmbed,
  kFinalNorm,
  kLmHead,
  kInputNorm,
  kQProj,
  kQAProj,
  kQANorm,
  kQBProj,
  kKProj,
  kVProj,
  kOProj,
  kQNorm,
  kKNorm,
  kKvAProj,
  kKvANorm,
  kKvBProj,
  kPostNorm,
  kDenseGate,
  kDenseUp,
  kDenseDown,
  kRouter,
  kExpertGate,
  kExpertUp,
  kExpertDown,
  kSharedGate,
  kSharedUp,
  kSharedDown,
};

struct TensorSpec {
  TensorRole role;
  int layer;   // -1 outside the layers.
  int expert;  // -1 unless it is a routed expert's.
  std::string name;
  std::vector<int64_t> shape;  // A matrix is [out, in], row-major: y = x W^T.
};

// Collects the tensors of a model; the families' tables are written with it.
class TensorTable {
 public:
  explicit TensorTable(const ModelConfig& config) : config_(config) {}

  // "model.embed_tokens.weight", "model.norm.weight" and, unless it is tied, "lm_head.weight".
  void AddOuter();
  // `suffix` goes behind "model.layers.N.".
  void Add(int layer, TensorRole role, const std::string& suffix, std::vector<int64_t> shape);
  void AddExpert(int layer, int expert, TensorRole role, const std::string& suffix,
                 std::vector<int64_t> shape);
  // q, k, v and o of grouped-query attention, with the norms of q and k where the config has them.
  void AddGroupedQueryAttention(int layer);
  void AddLayerNorms(int layer);
  // gate_proj, up_proj and down_proj of `width` under `suffix`.
  void AddDenseMlp(int layer, const std::string& suffix, int width);
  void AddSharedMlp(int layer, const std::string& suffix);
  // The router and all experts under "mlp.", as Qwen3 and DeepSeek write them.
  void AddMoe(int layer);

  std::vector<TensorSpec> Take() { return std::move(specs_); }

 private:
  const ModelConfig& config_;
  std::vector<TensorSpec> specs_;
};

// All tensors of the model. A tied lm_head is not among them.
std::vector<TensorSpec> ExpectedTensors(const ModelConfig& config);

// Elements of all expected tensors.
int64_t ParameterCount(const ModelConfig& config);

}  // namespace writescope::model
