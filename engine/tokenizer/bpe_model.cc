#include "engine/tokenizer/bpe_model.h"

#include <algorithm>

#include "engine/base/check.h"
#include "engine/tokenizer/strings.h"
#include "engine/tokenizer/utf8.h"

namespace writescope::tokenizer {

void BpeModel::AppendFallback(std::string_view character, std::vector<int32_t>* out) const {
  const auto token_of = [this](char byte) { return byte_tokens[static_cast<unsigned char>(byte)]; };
  const bool bytes = std::all_of(character.begin(), character.end(),
                                 [&](char byte) { return token_of(byte) >= 0; });
  if (bytes) {
    for (const char byte : character) out->push_back(token_of(byte));
    return;
  }
  CHECK(unknown.has_value()) << "loaders refuse a vocabulary that cannot spell every text";
  if (fuse_unknown && !out->empty() && out->back() == *unknown) return;
  out->push_back(*unknown);
}

void BpeModel::EncodeWord(std::string_view word, Scratch* scratch,
                          std::vector<TokenId>* ids) const {
  if (!whole_words.empty()) {
    if (const auto whole = whole_words.find(ToAbsl(word)); whole != whole_words.end()) {
      ids->push_back(whole->second);
      return;
    }
  }
  std::vector<int32_t>& symbols = scratch->symbols;
  symbols.clear();
  if (byte_level) {
    for (const char byte : word) {
      symbols.push_back(byte_tokens[static_cast<unsigned char>(byte)]);
    }
  } else {
    for (size_t pos = 0; pos < word.size();) {
      size_t next = 0;
      const auto symbol = char_symbols.find(DecodeAt(word, pos, &next));
      if (symbol != char_symbols.end()) {
        symbols.push_back(symbol->second);
      } else {
        AppendFallback(word.substr(pos, next - pos), &symbols);
      }
      pos = next;
    }
  }
  merges.Apply(&symbols, &scratch->merge);
  const size_t first = ids->size();
  for (const int32_t symbol : symbols) {
    if (symbol >= first_virtual) {
      AppendFallback(virtual_chars[static_cast<size_t>(symbol - first_virtual)], ids);
    } else if (fuse_unknown && unknown == symbol && ids->size() > first && ids->back() == symbol) {
      continue;  // An unknown character next to a virtual one that came out unknown too.
    } else {
      ids->push_back(symbol);
    }
  }
}

}  // namespace writescope::tokenizer
