// What the loaders of both file formats hand to Tokenizer.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/base/units.h"
#include "engine/tokenizer/added_tokens.h"
#include "engine/tokenizer/bpe_model.h"
#include "engine/tokenizer/normalizer.h"
#include "engine/tokenizer/pre_tokenizer.h"
#include "engine/tokenizer/tokenizer_config.h"

namespace writescope::tokenizer {

struct TokenizerParts {
  std::unique_ptr<const Normalizer> normalizer;
  PreTokenizer pre_tokenizer;
  BpeModel model;
  std::vector<AddedToken> added_tokens;
  absl::flat_hash_map<std::string, TokenId> ids;  // By the spelling in the file.
  std::vector<std::string> token_bytes;           // By id; empty where no token has the id.
  std::vector<bool> is_special;                   // By id.
  char strip = ' ';  // Decoded text loses at most strip_count of these at its start.
  int strip_count = 0;
  std::vector<TokenId> prefix;    // The file puts these in front; empty if it does not say.
  std::optional<TokenId> bos_id;  // As the file says; tokenizer_config.json goes before it.
  std::optional<TokenId> eos_id;
  bool add_bos_by_default = false;
};

// tokenizer.json at `path`.
absl::StatusOr<TokenizerParts> LoadTokenizerJson(const std::string& path);

// SentencePiece's tokenizer.model at `path`; the format is described in sentencepiece_wire.h.
absl::StatusOr<TokenizerParts> LoadSentencePiece(const std::string& path,
                                                 const TokenizerConfig& config);

}  // namespace writescope::tokenizer
