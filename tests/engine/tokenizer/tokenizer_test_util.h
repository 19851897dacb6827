// What the tests of the tokenizer share: the real tokenizers, small ones made by hand, and text
// that is likely to cause trouble.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/base/units.h"
#include "engine/tokenizer/tokenizer.h"
#include "nlohmann/json.hpp"

namespace writescope::tokenizer {

// "qwen3" or "deepseek_v3"; read once per process.
const Tokenizer& RealTokenizer(const std::string& name);
std::string RealTokenizerDir(const std::string& name);

// A file of tests/testdata.
nlohmann::json ReadTestdata(const std::string& name);

// A complete tokenizer.json: byte-level, ids 0..255 the bytes, then "ab" 256, "abc" 257,
// " a" 258, and the added tokens "<|end|>" 259 (special) and "<tool>" 260 (not special).
nlohmann::json ByteLevelFile();

// A complete tokenizer.json in the manner of Llama: <unk> 0, <s> 1, </s> 2, bytes 3..258, then the
// pieces of CharacterPieces() from 259 on.
nlohmann::json CharacterFile();
const std::vector<std::string>& CharacterPieces();

// Loads a folder that holds these files; an empty text leaves the file out.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadFiles(const std::string& tokenizer_json,
                                                     const std::string& tokenizer_config,
                                                     const std::string& tokenizer_model = "");

// Must succeed.
std::vector<TokenId> EncodeText(const Tokenizer& tokenizer, std::string_view text,
                                bool allow_special = false);

// Well-formed text of at most `max_parts` parts: scripts, marks, spaces, digits, controls, and any
// characters at all.
std::string RandomText(std::mt19937_64* rng, int max_parts);

}  // namespace writescope::tokenizer
