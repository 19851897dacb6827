#include "engine/model/weights.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/base/check.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/model/tensor_values.h"

namespace writescope::model {
namespace {

constexpr char kHeadName[] = "lm_head.weight";

// Another way to write a tensor: as whole tensor `name` of `shape`, or as a part of it.
struct Spelling {
  std::string name;
  std::vector<int64_t> shape;
  int64_t first_element = 0;
};

// transformers 5 calls the MoE module "mlp" in every family and keeps a layer's experts in two
// tensors: gate_up_proj [experts, 2 * width, hidden], gate rows first, and down_proj.
std::optional<Spelling> FusedSpelling(const ModelConfig& config, const TensorSpec& spec) {
  const std::string mlp = absl::StrCat("model.layers.", spec.layer, ".mlp.");
  const int64_t experts = config.moe.num_experts;
  const int64_t width = config.moe.expert_width;
  const int64_t hidden = config.hidden_size;
  const int64_t matrix = width * hidden;
  const std::vector<int64_t> gate_up_shape{experts, 2 * width, hidden};
  switch (spec.role) {
    case TensorRole::kRouter:
      return Spelling{mlp + "gate.weight", spec.shape, 0};
    case TensorRole::kExpertGate:
      return Spelling{mlp + "experts.gate_up_proj", gate_up_shape, spec.expert * 2 * matrix};
    case TensorRole::kExpertUp:
      return Spelling{mlp + "experts.gate_up_proj", gate_up_shape, (spec.expert * 2 + 1) * matrix};
    case TensorRole::kExpertDown:
      return Spelling{mlp + "experts.down_proj", {experts, hidden, width}, spec.expert * matrix};
    default:
      return std::nullopt;
  }
}

TensorView& OuterSlot(ModelWeights& weights, TensorRole role) {
  switch (role) {
    case TensorRole::kEmbed:
      return weights.embed;
    case TensorRole::kFinalNorm:
      return weights.final_norm;
    default:
      CHECK(role == TensorRole::kLmHead);
      return weights.lm_head;
  }
}

MlpWeights& Emplaced(std::optional<MlpWeights>& mlp) {
  if (!mlp) mlp.emplace();
  return *mlp;
}

MlpWeights& ExpertOf(LayerWeights& layer, int expert) {
  if (expert >= std::ssize(layer.experts)) layer.experts.resize(expert + 1);
  return layer.experts[expert];
}

TensorView& LayerSlot(LayerWeights& layer, const TensorSpec& spec) {
  AttentionWeights& attention = layer.attention;
  switch (spec.role) {
    case TensorRole::kInputNorm:
      return attention.input_norm;
    case TensorRole::kQProj:
      return attention.q_proj;
    case TensorRole::kQAProj:
      return attention.q_a_proj;
    case TensorRole::kQANorm:
      return attention.q_a_norm;
    case TensorRole::kQBProj:
      return attention.q_b_proj;
    case TensorRole::kKProj:
      return attention.k_proj;
    case TensorRole::kVProj:
      return attention.v_proj;
    case TensorRole::kOProj:
      return attention.o_proj;
    case TensorRole::kQNorm:
      return attention.q_norm;
    case TensorRole::kKNorm:
      return attention.k_norm;
    case TensorRole::kKvAProj:
      return attention.kv_a_proj;
    case TensorRole::kKvANorm:
      return attention.kv_a_norm;
    case TensorRole::kKvBProj:
      return attention.kv_b_proj;
    case TensorRole::kPostNorm:
      return layer.post_norm;
    case TensorRole::kDenseGate:
      return Emplaced(layer.dense).gate;
    case TensorRole::kDenseUp:
      return Emplaced(layer.dense).up;
    case TensorRole::kDenseDown:
      return Emplaced(layer.dense).down;
    case TensorRole::kRouter:
      return layer.router;
    case TensorRole::kExpertGate:
      return ExpertOf(layer, spec.expert).gate;
    case TensorRole::kExpertUp:
      return ExpertOf(layer, spec.expert).up;
    case TensorRole::kExpertDown:
      return ExpertOf(layer, spec.expert).down;
    case TensorRole::kSharedGate:
      return Emplaced(layer.shared).gate;
    case TensorRole::kSharedUp:
      return Emplaced(layer.shared).up;
    case TensorRole::kSharedDown:
      return Emplaced(layer.shared).down;
    case TensorRole::kEmbed:
    case TensorRole::kFinalNorm:
    case TensorRole::kLmHead:
      break;
  }
  CHECK(false) << spec.name << " is in no layer";
  return layer.router;
}

// Buffers that old versions of transformers wrote beside the weights. They follow from config.json,
// which is what is used.
bool IsKnownBuffer(const std::string& name) {
  return name == "model.rotary_emb.inv_freq" ||
         (absl::StartsWith(name, "model.layers.") &&
          absl::EndsWith(name, ".self_attn.rotary_emb.inv_freq"));
}

// Finds tensors in the checkpoint and keeps account of which were used and which are missing.
class Binder {
 public:
  Binder(const ModelConfig& config, const Checkpoint& checkpoint)
      : config_(config), checkpoint_(checkpoint) {}

  // An empty view, and a note, if the checkpoint has it under no name.
  absl::StatusOr<TensorView> Bind(const TensorSpec& spec) {
    Spelling spelling{spec.name, spec.shape, 0};
    const TensorView* whole = checkpoint_.Find(spec.name);
    if (whole == nullptr) {
      const std::optional<Spelling> fused = FusedSpelling(config_, spec);
      if (fused) whole = checkpoint_.Find(fused->name);
      if (whole == nullptr) {
        missing_.push_back(spec.name);
        return TensorView();
      }
      spelling = *fused;
    }
    RETURN_IF_ERROR(CheckTensor(*whole, spelling));
    used_.insert(whole->name);
    if (spelling.shape == spec.shape) return *whole;
    return Part(*whole, spec, spelling);
  }

  // A tensor that was bound and whose values are those of another one.
  void LeaveUnused(const TensorView& tensor) {
    used_.erase(tensor.name);
    unused_.insert(tensor.name);
  }

  // The checkpoint's tensors that were bound, once nothing is missing or left over.
  absl::StatusOr<std::vector<TensorView>> Finish() const {
    std::vector<std::string> unknown;
    std::vector<TensorView> bound;
    for (const TensorView& tensor : checkpoint_.tensors()) {
      // transformers writes the shared experts of a DeepSeek-V2 that has none: as [0, hidden].
      const bool empty = tensor.bytes.empty();
      if (used_.contains(tensor.name)) {
        bound.push_back(tensor);
      } else if (!empty && !unused_.contains(tensor.name) && !IsKnownBuffer(tensor.name)) {
        unknown.push_back(tensor.name);
      }
    }
    if (missing_.empty() && unknown.empty()) return bound;
    std::string message = absl::StrCat(checkpoint_.model_dir(), " does not hold a ",
                                       config_.architecture, " of its config.json:");
    AppendNames("missing", missing_, message);
    AppendNames("not known", unknown, message);
    return absl::InvalidArgumentError(message);
  }

 private:
  absl::Status CheckTensor(const TensorView& tensor, const Spelling& spelling) const {
    if (tensor.shape != spelling.shape) {
      return absl::InvalidArgumentError(absl::StrCat(
          checkpoint_.model_dir(), ": tensor ", tensor.name, " has shape ",
          ShapeString(tensor.shape), "; config.json asks for ", ShapeString(spelling.shape)));
    }
    if (!IsWeightDtype(tensor.dtype)) {
      return absl::UnimplementedError(
          absl::StrCat(checkpoint_.model_dir(), ": tensor ", tensor.name, " has dtype ",
                       DtypeName(tensor.dtype), "; weights are read as BF16, F16 or F32"));
    }
    return absl::OkStatus();
  }

  static TensorView Part(const TensorView& whole, const TensorSpec& spec,
                         const Spelling& spelling) {
    size_t elements = 1;
    for (const int64_t dim : spec.shape) elements *= static_cast<size_t>(dim);
    const size_t element_bytes = static_cast<size_t>(DtypeBytes(whole.dtype));
    TensorView part = whole;
    part.shape = spec.shape;
    part.bytes = whole.bytes.subspan(static_cast<size_t>(spelling.first_element) * element_bytes,
                                     elements * element_bytes);
    part.name = absl::StrCat(whole.name, " (", spec.name, ")");
    return part;
  }

  static void AppendNames(const char* what, const std::vector<std::string>& names,
                          std::string& message) {
    if (names.empty()) return;
    constexpr size_t kShown = 3;
    absl::StrAppend(&message, " ", names.size(), " tensors ", what, " (");
    for (size_t i = 0; i < std::min(names.size(), kShown); ++i) {
      absl::StrAppend(&message, i == 0 ? "" : ", ", absl::Utf8SafeCEscape(names[i]));
    }
    absl::StrAppend(&message, names.size() > kShown ? ", ...)" : ")");
  }

  const ModelConfig& config_;
  const Checkpoint& checkpoint_;
  absl::flat_hash_set<std::string> used_;
  absl::flat_hash_set<std::string> unused_;
  std::vector<std::string> missing_;
};

bool SameValues(const TensorView& a, const TensorView& b) {
  return a.dtype == b.dtype && a.bytes.size() == b.bytes.size() &&
         std::equal(a.bytes.begin(), a.bytes.end(), b.bytes.begin());
}

// A file can hold a head although config.json says that it is the embeddings. Where the two are
// equal only the embeddings are kept. Where they differ one of config.json and the file is wrong;
// like transformers 5 we believe the file, which was trained (transformers 4 ignores its head).
absl::Status BindTiedHead(const ModelConfig& config, Binder& binder, ModelWeights& weights) {
  TensorSpec spec{TensorRole::kLmHead, -1, -1, kHeadName, {}};
  spec.shape = {config.vocab_size, config.hidden_size};
  weights.lm_head = weights.embed;
  if (weights.checkpoint.Find(kHeadName) == nullptr || weights.embed.name == kHeadName) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(TensorView head, binder.Bind(spec));
  if (SameValues(head, weights.embed)) {
    binder.LeaveUnused(head);
    return absl::OkStatus();
  }
  Log(LogLevel::kWarning,
      absl::StrCat(weights.checkpoint.model_dir(), ": config.json has tie_word_embeddings, but ",
                   head.name, " is in the checkpoint and is not equal to ", weights.embed.name,
                   "; it is used, as if tie_word_embeddings were false. Programs that ignore it "
                   "give other answers"));
  weights.lm_head = std::move(head);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelWeights> LoadWeights(const std::string& model_dir, const ModelConfig& config) {
  ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(model_dir));
  for (const std::string& warning : checkpoint.warnings()) Log(LogLevel::kWarning, warning);
  ModelWeights weights{{}, {}, {}, {}, {}, std::move(checkpoint)};
  weights.layers.resize(config.num_layers);
  Binder binder(config, weights.checkpoint);
  for (TensorSpec& spec : ExpectedTensors(config)) {
    // Of two tied tensors a file may keep either.
    const bool tied = config.tie_word_embeddings && spec.role == TensorRole::kEmbed;
    if (tied && weights.checkpoint.Find(spec.name) == nullptr &&
        weights.checkpoint.Find(kHeadName) != nullptr) {
      spec.name = kHeadName;
    }
    ASSIGN_OR_RETURN(TensorView view, binder.Bind(spec));
    TensorView& slot = spec.layer < 0 ? OuterSlot(weights, spec.role)
                                      : LayerSlot(weights.layers[spec.layer], spec);
    slot = std::move(view);
  }
  if (config.tie_word_embeddings) RETURN_IF_ERROR(BindTiedHead(config, binder, weights));
  ASSIGN_OR_RETURN(weights.tensors, binder.Finish());
  Log(LogLevel::kInfo, "weights mapped",
      {{"model_dir", model_dir},
       {"files", weights.checkpoint.num_files()},
       {"tensors", weights.tensors.size()},
       {"bytes", WeightBytes(weights)},
       {"dtypes", DescribeDtypes(WeightDtypes(weights))}});
  return weights;
}

absl::StatusOr<ModelWeights> DummyWeights(const ModelConfig& config) {
  ModelWeights weights;
  weights.layers.resize(config.num_layers);
  for (const TensorSpec& spec : ExpectedTensors(config)) {
    TensorView& slot = spec.layer < 0 ? OuterSlot(weights, spec.role)
                                      : LayerSlot(weights.layers[spec.layer], spec);
    slot = {.dtype = Dtype::kBF16, .shape = spec.shape, .bytes = {}, .name = spec.name};
  }
  if (config.tie_word_embeddings) weights.lm_head = weights.embed;
  return weights;
}

std::map<Dtype, DtypeUse> WeightDtypes(const ModelWeights& weights) {
  std::map<Dtype, DtypeUse> dtypes;
  for (const TensorView& tensor : weights.tensors) {
    DtypeUse& use = dtypes[tensor.dtype];
    ++use.num_tensors;
    use.num_bytes += std::ssize(tensor.bytes);
  }
  return dtypes;
}

std::string DescribeDtypes(const std::map<Dtype, DtypeUse>& dtypes) {
  std::string text;
  for (const auto& [dtype, use] : dtypes) {
    absl::StrAppend(&text, text.empty() ? "" : "; ", DtypeName(dtype), ": ", use.num_tensors,
                    " tensors, ", use.num_bytes, " bytes");
  }
  return text;
}

int64_t WeightBytes(const ModelWeights& weights) {
  int64_t bytes = 0;
  for (const TensorView& tensor : weights.tensors) bytes += std::ssize(tensor.bytes);
  return bytes;
}

absl::Status CheckFinite(const ModelWeights& weights) {
  for (const TensorView& tensor : weights.tensors) RETURN_IF_ERROR(CheckTensorFinite(tensor));
  return absl::OkStatus();
}

}  // namespace writescope::model
