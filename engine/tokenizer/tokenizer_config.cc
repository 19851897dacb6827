#include "engine/tokenizer/tokenizer_config.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "engine/base/regular_file.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/json_fields.h"
#include "engine/tokenizer/strings.h"

namespace writescope::tokenizer {
namespace {

constexpr char kFileName[] = "tokenizer_config.json";

// A token is given as its text or as an object that holds it.
absl::StatusOr<std::string> TokenText(const Json& config, const char* key) {
  const Json* field = FindField(config, key);
  if (field == nullptr) return std::string();
  if (field->is_object()) return RequireString(*field, "content", Cat(kFileName, ": ", key));
  return RequireString(config, key, kFileName);
}

absl::StatusOr<std::optional<std::string>> ChatTemplateText(const Json& config) {
  const Json* field = FindField(config, "chat_template");
  if (field == nullptr) return std::optional<std::string>();
  if (field->is_string()) return std::optional<std::string>(field->get_ref<const std::string&>());
  ASSIGN_OR_RETURN(const Json* list, RequireArray(config, "chat_template", kFileName));
  for (size_t i = 0; i < list->size(); ++i) {
    const std::string where = Cat(kFileName, ": chat_template[", i, "]");
    ASSIGN_OR_RETURN(const std::string name, RequireString((*list)[i], "name", where));
    ASSIGN_OR_RETURN(std::string text, RequireString((*list)[i], "template", where));
    if (name == "default" || list->size() == 1) return std::optional<std::string>(std::move(text));
  }
  return absl::InvalidArgumentError(
      Cat(kFileName, ": chat_template lists ", list->size(), " templates, none named \"default\""));
}

absl::Status ReadAddedTokensDecoder(const Json& config, std::vector<AddedToken>* tokens) {
  if (FindField(config, "added_tokens_decoder") == nullptr) return absl::OkStatus();
  ASSIGN_OR_RETURN(const Json* decoder, RequireObject(config, "added_tokens_decoder", kFileName));
  for (const auto& [key, spec] : decoder->items()) {
    const std::string where = Cat(kFileName, ": added_tokens_decoder[", key, "]");
    ASSIGN_OR_RETURN(AddedToken token, ReadAddedToken(spec, where));
    if (!absl::SimpleAtoi(key, &token.id) || token.id < 0) {
      return absl::InvalidArgumentError(Cat(where, ": the key must be a token id"));
    }
    tokens->push_back(std::move(token));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<AddedToken> ReadAddedToken(const nlohmann::json& spec, const std::string& where) {
  AddedToken token;
  ASSIGN_OR_RETURN(token.content, RequireString(spec, "content", where));
  if (token.content.empty()) {
    return absl::InvalidArgumentError(Cat(where, ": field \"content\" is empty"));
  }
  ASSIGN_OR_RETURN(token.special, BoolOr(spec, "special", false, where));
  ASSIGN_OR_RETURN(token.normalized, BoolOr(spec, "normalized", !token.special, where));
  ASSIGN_OR_RETURN(token.lstrip, BoolOr(spec, "lstrip", false, where));
  ASSIGN_OR_RETURN(token.rstrip, BoolOr(spec, "rstrip", false, where));
  ASSIGN_OR_RETURN(token.single_word, BoolOr(spec, "single_word", false, where));
  return token;
}

absl::StatusOr<TokenizerConfig> TokenizerConfig::Load(const std::string& model_dir) {
  TokenizerConfig result;
  absl::StatusOr<Json> file = ReadJsonFile(Cat(model_dir, "/", kFileName));
  if (file.ok()) {
    const Json& config = *file;
    if (!config.is_object()) {
      return absl::InvalidArgumentError(Cat(model_dir, "/", kFileName, ": no object"));
    }
    ASSIGN_OR_RETURN(result.tokenizer_class, StringOr(config, "tokenizer_class", "", kFileName));
    ASSIGN_OR_RETURN(result.bos_token, TokenText(config, "bos_token"));
    ASSIGN_OR_RETURN(result.eos_token, TokenText(config, "eos_token"));
    if (FindField(config, "add_bos_token") != nullptr) {
      ASSIGN_OR_RETURN(result.add_bos_token, BoolOr(config, "add_bos_token", false, kFileName));
    }
    ASSIGN_OR_RETURN(result.legacy, BoolOr(config, "legacy", true, kFileName));
    ASSIGN_OR_RETURN(result.chat_template, ChatTemplateText(config));
    RETURN_IF_ERROR(ReadAddedTokensDecoder(config, &result.added_tokens));
  } else if (!absl::IsNotFound(file.status())) {
    return file.status();
  }
  absl::StatusOr<std::string> jinja =
      ReadRegularFile(Cat(model_dir, "/chat_template.jinja"), kMaxTokenizerFileBytes);
  if (jinja.ok()) {
    result.chat_template = *std::move(jinja);
  } else if (!absl::IsNotFound(jinja.status())) {
    return jinja.status();
  }
  return result;
}

}  // namespace writescope::tokenizer
