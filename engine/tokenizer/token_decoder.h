// What a token of the vocabulary says in text: its raw bytes.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json_fwd.hpp"

namespace writescope::tokenizer {

// The rules that turn spelled tokens into text. Filled by a loader, constant from then on.
struct TokenDecoder {
  // From the "decoder" of tokenizer.json: ByteLevel, Replace, ByteFallback, Fuse, Strip at the
  // start, Metaspace, Sequence. Another kind is Unimplemented and named.
  static absl::StatusOr<TokenDecoder> FromJson(const nlohmann::json& spec);

  std::string BytesOf(std::string_view token) const;

  bool byte_level = false;                                        // Tokens spell bytes.
  bool byte_fallback = false;                                     // <0x00>..<0xFF> are bytes.
  std::vector<std::pair<std::string, std::string>> replacements;  // In every token, in order.
  // At most this many of this character are left out at the start of the whole text.
  std::string strip;
  int strip_count = 0;
};

// The byte that <0xHH> stands for, or -1.
int ByteOfFallbackToken(std::string_view token);

}  // namespace writescope::tokenizer
