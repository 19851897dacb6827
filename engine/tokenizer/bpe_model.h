// From a word to token ids: the first symbols, the merges, and what stands for characters that the
// vocabulary lacks.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/base/units.h"
#include "engine/tokenizer/bpe.h"

namespace writescope::tokenizer {

// Filled by a loader, constant from then on; then thread-safe.
struct BpeModel {
  struct Scratch {
    std::vector<int32_t> symbols;
    BpeMerges::Scratch merge;
  };

  // Appends the ids of `word`, well-formed UTF-8 or, in a byte-level model, any bytes.
  void EncodeWord(std::string_view word, Scratch* scratch, std::vector<TokenId>* ids) const;

  // Byte-level: the first symbols are bytes, and every byte of UTF-8 has one. Otherwise they are
  // characters.
  bool byte_level = false;
  // By byte: byte-level, its first symbol; otherwise the token that it falls back to. -1: none.
  std::array<TokenId, 256> byte_tokens = FilledWithNone();
  absl::flat_hash_map<char32_t, int32_t> char_symbols;
  // Characters that are no tokens but parts of some; their symbols are first_virtual + index.
  std::vector<std::string> virtual_chars;
  int32_t first_virtual = INT32_MAX;
  BpeMerges merges;
  // For a character without a symbol and without fallback; a run of them is one if fuse_unknown.
  std::optional<TokenId> unknown;
  bool fuse_unknown = false;
  // Words that are taken whole before any merge; empty unless the file asks for it.
  absl::flat_hash_map<std::string, TokenId> whole_words;

 private:
  static std::array<TokenId, 256> FilledWithNone() {
    std::array<TokenId, 256> none;
    none.fill(-1);
    return none;
  }
  // Appends to *out what stands for `character`; *out is symbols before merging or ids after it.
  void AppendFallback(std::string_view character, std::vector<int32_t>* out) const;
};

}  // namespace writescope::tokenizer
