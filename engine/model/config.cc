#include "engine/model/config.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/regular_file.h"
#include "engine/base/status_macros.h"
#include "engine/model/config_limits.h"
#include "engine/model/deepseek_v2.h"
#include "engine/model/grouped_query_config.h"
#include "engine/model/json_reader.h"
#include "engine/model/mixtral.h"
#include "engine/model/qwen3_moe.h"
#include "engine/model/rope_frequencies.h"
#include "engine/model/tensor_spec.h"
#include "nlohmann/json.hpp"

namespace writescope::model {
namespace {

constexpr int64_t kMaxConfigBytes = 16 * kMiB;
constexpr char kConfigFile[] = "config.json";
constexpr char kGenerationConfigFile[] = "generation_config.json";

struct KnownFamily {
  Family family;
  const char* model_type;
  const char* architecture;
};
constexpr KnownFamily kFamilies[] = {
    {Family::kMixtral, "mixtral", "MixtralForCausalLM"},
    {Family::kQwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM"},
    {Family::kDeepseekV2, "deepseek_v2", "DeepseekV2ForCausalLM"},
};

std::string KnownArchitectures() {
  std::string list;
  for (const KnownFamily& known : kFamilies) {
    absl::StrAppend(&list, list.empty() ? "" : ", ", known.architecture);
  }
  return list;
}

const KnownFamily* FamilyOf(const std::string& name, const char* KnownFamily::*field) {
  for (const KnownFamily& known : kFamilies) {
    if (name == known.*field) return &known;
  }
  return nullptr;
}

absl::Status UnknownFamily(const JsonObject& json, const char* field, const std::string& value) {
  return absl::UnimplementedError(absl::StrCat(json.FieldPath(field), " names \"", value,
                                               "\", which is not implemented; implemented are ",
                                               KnownArchitectures()));
}

// Both fields are believed, so they must agree; either may be missing.
absl::Status ReadFamily(const JsonObject& json, ModelConfig& config) {
  const KnownFamily* family = nullptr;
  ASSIGN_OR_RETURN(const std::vector<std::string> architectures, json.StringList("architectures"));
  for (const std::string& name : architectures) {
    const KnownFamily* named = FamilyOf(name, &KnownFamily::architecture);
    if (named == nullptr) return UnknownFamily(json, "architectures", name);
    if (family != nullptr && named != family) {
      return absl::InvalidArgumentError(absl::StrCat(json.FieldPath("architectures"), " names ",
                                                     family->architecture, " and ", name,
                                                     "; it must name one family"));
    }
    family = named;
  }
  ASSIGN_OR_RETURN(const std::string model_type, json.StringOr({"model_type"}, ""));
  if (!model_type.empty()) {
    const KnownFamily* typed = FamilyOf(model_type, &KnownFamily::model_type);
    if (typed == nullptr) return UnknownFamily(json, "model_type", model_type);
    if (family != nullptr && typed != family) {
      return absl::InvalidArgumentError(absl::StrCat(json.FieldPath("architectures"), " names ",
                                                     family->architecture, " but model_type is \"",
                                                     model_type, "\""));
    }
    family = typed;
  }
  if (family == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(json.FieldPath("architectures"),
                     " and model_type are both absent or null; one must name the model's family (",
                     KnownArchitectures(), ")"));
  }
  config.family = family->family;
  config.architecture = family->architecture;
  return absl::OkStatus();
}

// Features that change the computation in a way that no family here computes.
absl::Status RefuseUnservedFeatures(const JsonObject& json) {
  for (const char* field : {"attention_bias", "qkv_bias", "mlp_bias"}) {
    ASSIGN_OR_RETURN(const bool on, json.BoolOr({field}, false));
    if (on) {
      return absl::UnimplementedError(
          absl::StrCat(json.FieldPath(field), " is true; bias vectors are not implemented"));
    }
  }
  ASSIGN_OR_RETURN(const bool causal, json.BoolOr({"is_causal"}, true));
  if (!causal) {
    return absl::UnimplementedError(
        absl::StrCat(json.FieldPath("is_causal"),
                     " is false; attention to tokens that come later is not implemented"));
  }
  ASSIGN_OR_RETURN(const std::string activation, json.StringOr({"hidden_act"}, "silu"));
  if (activation != "silu" && activation != "swish") {  // Two names of one function.
    return absl::UnimplementedError(absl::StrCat(json.FieldPath("hidden_act"), " is \"", activation,
                                                 "\"; only \"silu\" is implemented"));
  }
  for (const char* field : {"quantization_config", "compression_config"}) {
    ASSIGN_OR_RETURN(const std::optional<JsonObject> quantization, json.Object(field));
    if (!quantization) continue;
    ASSIGN_OR_RETURN(const std::string method, quantization->StringOr({"quant_method"}, "unnamed"));
    return absl::UnimplementedError(
        absl::StrCat(json.FieldPath(field), " says that the weights are quantised (quant_method \"",
                     method, "\"); only bf16, f16 and f32 checkpoints are read"));
  }
  ASSIGN_OR_RETURN(const std::optional<JsonObject> by_layer, json.Object("per_layer_config"));
  if (by_layer && !by_layer->FieldWithObject().empty()) {
    return absl::UnimplementedError(
        absl::StrCat(by_layer->FieldPath(by_layer->FieldWithObject().c_str()),
                     " is an object; layers with values of their own are not implemented"));
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> layer_types, json.StringList("layer_types"));
  for (const std::string& type : layer_types) {
    if (type != "full_attention") {
      return absl::UnimplementedError(absl::StrCat(json.FieldPath("layer_types"), " holds \"", type,
                                                   "\"; only \"full_attention\" is implemented"));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadCommon(const JsonObject& json, ModelConfig& config) {
  ASSIGN_OR_RETURN(config.vocab_size, json.Int({"vocab_size"}, kVocabRange));
  ASSIGN_OR_RETURN(config.hidden_size, json.Int({"hidden_size"}, kWidthRange));
  ASSIGN_OR_RETURN(config.num_layers, json.Int({"num_hidden_layers"}, kLayersRange));
  ASSIGN_OR_RETURN(config.num_heads, json.Int({"num_attention_heads"}, kHeadsRange));
  ASSIGN_OR_RETURN(config.max_position_embeddings,
                   json.Int({"max_position_embeddings"}, kPositionsRange));
  ASSIGN_OR_RETURN(config.tie_word_embeddings, json.BoolOr({"tie_word_embeddings"}, false));
  ASSIGN_OR_RETURN(config.dtype, json.StringOr({"dtype", "torch_dtype"}, ""));
  if (!config.dtype.empty() && config.dtype != "bfloat16" && config.dtype != "float16" &&
      config.dtype != "float32") {
    return absl::InvalidArgumentError(absl::StrCat(json.FieldPath("dtype"),
                                                   " (or torch_dtype) is \"", config.dtype,
                                                   "\"; it must be bfloat16, float16 or float32"));
  }
  return absl::OkStatus();
}

absl::Status CheckTheta(const JsonObject& json, const RopeConfig& rope) {
  if (rope.theta > 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(json.FieldPath("rope_theta"), " is ", rope.theta, "; it must be above 1"));
}

// cos and sin are multiplied by it. Where one of the two mscales is left out or 0, the models' own
// code still takes the ratio and transformers does not: a checkpoint may have been made with
// either.
absl::Status ReadAttentionFactor(const JsonObject& json, RopeConfig& rope) {
  const double ratio = YarnAttentionFactor(rope);
  ASSIGN_OR_RETURN(rope.attention_factor, json.PositiveDoubleOr({"attention_factor"}, ratio));
  const bool both = json.Has({"mscale"}) && rope.mscale > 0 && rope.mscale_all_dim > 0;
  const double without = YarnMscale(rope.factor, 1);
  if (both || json.Has({"attention_factor"}) || ratio == without) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(json.FieldPath("mscale"), " ", rope.mscale, " and mscale_all_dim ",
                   rope.mscale_all_dim, " can be read as an attention_factor of ", ratio, " or of ",
                   without, "; attention_factor must say which"));
}

// What config.json says beside rope_scaling or rope_parameters.
struct OuterPositions {
  int max = 0;
  std::optional<int> original;
};

// The rope's own original_max_position_embeddings, or the one beside it: transformers 5 takes the
// outer one first, 4 does not know it, so both must agree.
absl::Status ReadOriginalPositions(const JsonObject& json, const OuterPositions& outer,
                                   RopeConfig& rope) {
  ASSIGN_OR_RETURN(const std::optional<int> inner,
                   json.OptionalInt({"original_max_position_embeddings"}, kPositionsRange));
  if (inner && outer.original && *inner != *outer.original) {
    return absl::InvalidArgumentError(
        absl::StrCat(json.FieldPath("original_max_position_embeddings"), " is ", *inner,
                     " but the outer original_max_position_embeddings is ", *outer.original));
  }
  rope.original_max_positions = inner.value_or(outer.original.value_or(outer.max));
  return absl::OkStatus();
}

absl::Status ReadYarn(const JsonObject& json, const OuterPositions& outer, RopeConfig& rope) {
  rope.kind = RopeConfig::Kind::kYarn;
  if (!outer.original && !json.Has({"factor", "original_max_position_embeddings"})) {
    return absl::InvalidArgumentError(absl::StrCat(
        json.FieldPath("factor"),
        " and original_max_position_embeddings are both absent or null; yarn needs one"));
  }
  RETURN_IF_ERROR(ReadOriginalPositions(json, outer, rope));
  const double stretch = static_cast<double>(outer.max) / rope.original_max_positions;
  ASSIGN_OR_RETURN(rope.factor, json.PositiveDoubleOr({"factor"}, stretch));
  if (rope.factor < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(json.FieldPath("factor"), " is ", rope.factor, "; yarn needs 1 or more"));
  }
  ASSIGN_OR_RETURN(rope.beta_fast, json.PositiveDoubleOr({"beta_fast"}, 32));
  ASSIGN_OR_RETURN(rope.beta_slow, json.PositiveDoubleOr({"beta_slow"}, 1));
  if (rope.beta_fast < rope.beta_slow) {
    return absl::InvalidArgumentError(absl::StrCat(json.FieldPath("beta_fast"), " is ",
                                                   rope.beta_fast, ", below beta_slow, ",
                                                   rope.beta_slow));
  }
  ASSIGN_OR_RETURN(rope.mscale, json.NonNegativeDoubleOr({"mscale"}, 1));
  ASSIGN_OR_RETURN(rope.mscale_all_dim, json.NonNegativeDoubleOr({"mscale_all_dim"}, 0));
  ASSIGN_OR_RETURN(rope.truncate_range, json.BoolOr({"truncate"}, true));
  const YarnRange range = YarnCorrectionRange(rope);
  if (!(range.low < range.high)) {
    return absl::InvalidArgumentError(absl::StrCat(
        json.FieldPath("original_max_position_embeddings"), " ", rope.original_max_positions,
        " with rope_theta ", rope.theta, " makes a yarn range from pair ", range.low, " to ",
        range.high, "; it must rise"));
  }
  return ReadAttentionFactor(json, rope);
}

// `json` is the whole config, rope_scaling or rope_parameters: all of them may say it.
absl::Status RefusePartialRotation(const JsonObject& json) {
  ASSIGN_OR_RETURN(const double partial, json.PositiveDoubleOr({"partial_rotary_factor"}, 1));
  if (partial == 1) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(json.FieldPath("partial_rotary_factor"), " is ",
                                               partial, "; these models rotate whole heads"));
}

// `json` is rope_scaling or rope_parameters; an absent type means no scaling.
absl::Status ReadRopeKind(const JsonObject& json, const OuterPositions& outer, RopeConfig& rope) {
  const std::string layer_type = json.FieldWithObject();
  if (!layer_type.empty()) {
    return absl::UnimplementedError(absl::StrCat(json.FieldPath(layer_type.c_str()),
                                                 " is an object; one rope for all layers is "
                                                 "implemented, not one for each type of layer"));
  }
  ASSIGN_OR_RETURN(const std::string kind, json.StringOr({"rope_type", "type"}, "default"));
  RETURN_IF_ERROR(RefusePartialRotation(json));
  if (kind == "default") {
    // A factor without a type would be ignored: the context would not stretch, without a word.
    ASSIGN_OR_RETURN(const double factor, json.PositiveDoubleOr({"factor"}, 1));
    if (factor != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(json.FieldPath("factor"), " is ", factor,
                       " but rope_type is \"default\" or absent, which does not use it"));
    }
    return absl::OkStatus();
  }
  if (kind == "yarn") return ReadYarn(json, outer, rope);
  return absl::UnimplementedError(absl::StrCat(json.FieldPath("rope_type"), " is \"", kind,
                                               "\"; \"default\" and \"yarn\" are implemented"));
}

// Before: config.rope holds the family's dim, pairing and default theta.
absl::Status ReadRope(const JsonObject& json, ModelConfig& config) {
  RopeConfig& rope = config.rope;
  if (rope.dim % 2 != 0) {
    const char* field = config.mla ? "qk_rope_head_dim" : "head_dim";
    return absl::InvalidArgumentError(absl::StrCat(json.FieldPath(field), " is ", rope.dim,
                                                   "; rope turns pairs, so it must be even"));
  }
  RETURN_IF_ERROR(RefusePartialRotation(json));
  ASSIGN_OR_RETURN(const std::optional<JsonObject> parameters, json.Object("rope_parameters"));
  ASSIGN_OR_RETURN(const std::optional<JsonObject> scaling, json.Object("rope_scaling"));
  ASSIGN_OR_RETURN(rope.theta, json.PositiveDoubleOr({"rope_theta"}, rope.theta));
  OuterPositions positions{.max = config.max_position_embeddings};
  ASSIGN_OR_RETURN(positions.original,
                   json.OptionalInt({"original_max_position_embeddings"}, kPositionsRange));
  std::optional<RopeConfig> read;
  for (const std::optional<JsonObject>& object : {parameters, scaling}) {
    if (!object) continue;
    RopeConfig here = rope;
    const double outer = read ? read->theta : rope.theta;
    ASSIGN_OR_RETURN(here.theta, object->PositiveDoubleOr({"rope_theta"}, outer));
    if (json.Has({"rope_theta"}) && here.theta != rope.theta) {
      return absl::InvalidArgumentError(absl::StrCat(object->FieldPath("rope_theta"), " is ",
                                                     here.theta, " but the outer rope_theta is ",
                                                     rope.theta));
    }
    RETURN_IF_ERROR(CheckTheta(*object, here));
    RETURN_IF_ERROR(ReadRopeKind(*object, positions, here));
    // Files of two generations of writers have both spellings of this field.
    if (read && !(*read == here)) {
      return absl::InvalidArgumentError(
          absl::StrCat(json.FieldPath("rope_parameters"),
                       " and rope_scaling are two spellings of one field and differ"));
    }
    read = here;
  }
  if (read) rope = *read;
  return CheckTheta(json, rope);
}

// Yarn makes a model for longer texts whether max_position_embeddings says so or not: the makers of
// Qwen3 leave it as it was. Where there is a window, as far as it hides nothing.
absl::Status StretchContext(const JsonObject& json, ModelConfig& config) {
  double longest = kPositionsRange.max;
  if (!config.mla) {
    ASSIGN_OR_RETURN(const std::optional<int> window, ReadSlidingWindow(json, config));
    if (window) longest = *window;
  }
  if (config.rope.kind != RopeConfig::Kind::kYarn) return absl::OkStatus();
  const double stretched = config.rope.factor * config.rope.original_max_positions;
  config.max_position_embeddings =
      std::max(config.max_position_embeddings, static_cast<int>(std::min(stretched, longest)));
  return absl::OkStatus();
}

absl::Status AddEosIds(const JsonObject& json, ModelConfig& config) {
  ASSIGN_OR_RETURN(const std::vector<int> ids,
                   json.IntList("eos_token_id", {0, config.vocab_size - 1}));
  for (const TokenId id : ids) {
    const auto& known = config.eos_ids;
    if (std::find(known.begin(), known.end(), id) == known.end()) config.eos_ids.push_back(id);
  }
  return absl::OkStatus();
}

// A token that either file calls an end of sequence is one: instruct models often name the end of
// a turn in one file and the end of a document in the other.
absl::Status ReadTokens(const JsonObject& json, std::string_view generation_config_json,
                        ModelConfig& config) {
  const IntRange token_range{0, config.vocab_size - 1};
  ASSIGN_OR_RETURN(config.bos, json.OptionalInt({"bos_token_id"}, token_range));
  if (!generation_config_json.empty()) {
    ASSIGN_OR_RETURN(const nlohmann::json generation_value,
                     ParseJson(generation_config_json, kGenerationConfigFile));
    ASSIGN_OR_RETURN(const JsonObject generation,
                     JsonObject::Create(generation_value, kGenerationConfigFile));
    RETURN_IF_ERROR(AddEosIds(generation, config));
    if (!config.bos) {
      ASSIGN_OR_RETURN(config.bos, generation.OptionalInt({"bos_token_id"}, token_range));
    }
  }
  return AddEosIds(json, config);
}

absl::Status CheckWhole(const JsonObject& json, const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  if (moe.experts_per_token > moe.num_experts) {
    return absl::InvalidArgumentError(absl::StrCat(json.FieldPath("num_experts_per_tok"), " is ",
                                                   moe.experts_per_token, ", above the ",
                                                   moe.num_experts, " experts there are"));
  }
  if (int64_t{moe.num_experts} * config.num_layers > kMaxExpertsInModel) {
    return absl::InvalidArgumentError(absl::StrCat(json.FieldPath("num_hidden_layers"), " ",
                                                   config.num_layers, " times ", moe.num_experts,
                                                   " experts is above ", kMaxExpertsInModel));
  }
  double parameters = 0;
  for (const TensorSpec& spec : ExpectedTensors(config)) {
    double elements = 1;
    for (const int64_t dim : spec.shape) elements *= static_cast<double>(dim);
    parameters += elements;
  }
  if (parameters > kMaxParameters) {
    return absl::InvalidArgumentError(
        absl::StrCat(json.FieldPath("hidden_size"), " and the other sizes make ", parameters,
                     " parameters; at most ", kMaxParameters, " are taken for a real model"));
  }
  return absl::OkStatus();
}

}  // namespace

const char* FamilyName(Family family) {
  for (const KnownFamily& known : kFamilies) {
    if (known.family == family) return known.model_type;
  }
  return "unknown";
}

absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view config_json,
                                             std::string_view generation_config_json) {
  ASSIGN_OR_RETURN(const nlohmann::json value, ParseJson(config_json, kConfigFile));
  ASSIGN_OR_RETURN(const JsonObject json, JsonObject::Create(value, kConfigFile));
  ModelConfig config;
  RETURN_IF_ERROR(ReadFamily(json, config));
  RETURN_IF_ERROR(RefuseUnservedFeatures(json));
  RETURN_IF_ERROR(ReadCommon(json, config));
  switch (config.family) {
    case Family::kMixtral:
      RETURN_IF_ERROR(ReadMixtralConfig(json, config));
      break;
    case Family::kQwen3Moe:
      RETURN_IF_ERROR(ReadQwen3MoeConfig(json, config));
      break;
    case Family::kDeepseekV2:
      RETURN_IF_ERROR(ReadDeepseekV2Config(json, config));
      break;
  }
  RETURN_IF_ERROR(ReadRope(json, config));
  RETURN_IF_ERROR(StretchContext(json, config));
  config.softmax_scale = SoftmaxScale(config);
  RETURN_IF_ERROR(ReadTokens(json, generation_config_json, config));
  RETURN_IF_ERROR(CheckWhole(json, config));
  return config;
}

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& model_dir) {
  ASSIGN_OR_RETURN(const std::string config_json,
                   ReadRegularFile(absl::StrCat(model_dir, "/", kConfigFile), kMaxConfigBytes));
  const absl::StatusOr<std::string> generation_json =
      ReadRegularFile(absl::StrCat(model_dir, "/", kGenerationConfigFile), kMaxConfigBytes);
  if (!generation_json.ok() && !absl::IsNotFound(generation_json.status())) {
    return generation_json.status();
  }
  if (generation_json.ok() && generation_json->empty()) {
    return absl::DataLossError(absl::StrCat(model_dir, "/", kGenerationConfigFile, " is empty"));
  }
  absl::StatusOr<ModelConfig> config =
      ParseModelConfig(config_json, generation_json.ok() ? *generation_json : std::string());
  if (config.ok()) return config;
  return absl::Status(config.status().code(),
                      absl::StrCat(model_dir, "/", config.status().message()));
}

}  // namespace writescope::model
