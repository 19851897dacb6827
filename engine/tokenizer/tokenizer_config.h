// What tokenizer_config.json of a checkpoint says, as far as it matters here.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer/added_tokens.h"
#include "nlohmann/json_fwd.hpp"

namespace writescope::tokenizer {

struct TokenizerConfig {
  // All fields keep their defaults if the folder has no such file.
  static absl::StatusOr<TokenizerConfig> Load(const std::string& model_dir);

  std::string tokenizer_class;
  std::string bos_token;  // Empty: none.
  std::string eos_token;
  std::optional<bool> add_bos_token;
  bool legacy = true;  // SentencePiece only: every piece of text gets the dummy prefix.
  std::vector<AddedToken> added_tokens;  // From added_tokens_decoder.
  // The template named "default", or the only one; chat_template.jinja goes before this file.
  std::optional<std::string> chat_template;
};

// Reads content and flags of an added token; the id comes from elsewhere.
absl::StatusOr<AddedToken> ReadAddedToken(const nlohmann::json& spec, const std::string& where);

}  // namespace writescope::tokenizer
