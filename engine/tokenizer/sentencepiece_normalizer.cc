#include "engine/tokenizer/sentencepiece_normalizer.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/strings.h"
#include "engine/tokenizer/utf8.h"

namespace writescope::tokenizer {
namespace {

constexpr std::string_view kSpaceSpelling = "\u2581";

uint32_t ReadUint32(std::string_view bytes, size_t offset) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) {
    value |= uint32_t{static_cast<unsigned char>(bytes[offset + i])} << (8 * i);
  }
  return value;
}

// The compiled map: uint32 size of the trie in bytes, the trie's units (uint32, little endian),
// then the replacements, each ended by NUL. A unit of the double array holds, from the top bit: a
// mark that it is a value, or else the offset to its children (bits 10..30, in units of 256 if bit
// 9 is set), whether one of them is a value (bit 8), and the byte that leads to it (bits 0..7).
class CharsMap {
 public:
  static absl::StatusOr<CharsMap> Parse(std::string_view bytes) {
    CharsMap map;
    if (bytes.empty()) return map;
    const auto broken = [&](std::string_view what) {
      return absl::InvalidArgumentError(
          Cat("precompiled_charsmap of ", bytes.size(), " bytes: ", what));
    };
    if (bytes.size() < 4) return broken("too short");
    const size_t trie_bytes = ReadUint32(bytes, 0);
    if (trie_bytes == 0 || trie_bytes % 4 != 0 || trie_bytes > bytes.size() - 4) {
      return broken(Cat("a trie of ", trie_bytes, " bytes"));
    }
    for (size_t offset = 4; offset < 4 + trie_bytes; offset += 4) {
      map.units_.push_back(ReadUint32(bytes, offset));
    }
    map.replacements_ = std::string(bytes.substr(4 + trie_bytes));
    if (map.replacements_.empty() || map.replacements_.back() != '\0' ||
        FindInvalidUtf8(map.replacements_) != std::string_view::npos) {
      return broken("the replacements are not NUL-ended UTF-8");
    }
    return map;
  }

  // What the longest mapped prefix of `text`, or else its first character, becomes; sets *length
  // to how much of `text` that is. `text` is not empty.
  std::string_view Map(std::string_view text, size_t* length) const {
    *length = CharLength(text.front());
    std::string_view result = text.substr(0, *length);
    if (units_.empty()) return result;
    size_t node = Offset(units_[0]);
    for (size_t i = 0; i < text.size(); ++i) {
      const auto byte = static_cast<unsigned char>(text[i]);
      node ^= byte;
      if (node >= units_.size() || Label(units_[node]) != byte) break;
      const uint32_t unit = units_[node];
      node ^= Offset(unit);
      if (node >= units_.size()) break;
      if ((unit >> 8 & 1) == 0) continue;
      const size_t replacement = units_[node] & 0x7FFFFFFF;
      // A broken map may point outside, or into a character; such an entry does not count.
      if (replacement >= replacements_.size() ||
          (static_cast<unsigned char>(replacements_[replacement]) & 0xC0) == 0x80) {
        continue;
      }
      const bool whole_chars =
          i + 1 == text.size() || (static_cast<unsigned char>(text[i + 1]) & 0xC0) != 0x80;
      if (!whole_chars) continue;
      *length = i + 1;
      result = std::string_view(replacements_.c_str() + replacement);
    }
    return result;
  }

 private:
  static size_t Offset(uint32_t unit) {
    return static_cast<size_t>(unit >> 10) << ((unit & (1u << 9)) >> 6);
  }
  static uint32_t Label(uint32_t unit) { return unit & (1u << 31 | 0xFF); }

  std::vector<uint32_t> units_;
  std::string replacements_;
};

class SentencePieceNormalizer : public Normalizer {
 public:
  SentencePieceNormalizer(CharsMap map, const SentencePieceModel& model, bool prefix_every_piece)
      : map_(std::move(map)),
        space_(model.escape_whitespaces ? kSpaceSpelling : " "),
        add_dummy_prefix_(model.add_dummy_prefix),
        remove_extra_whitespaces_(model.remove_extra_whitespaces),
        prefix_every_piece_(prefix_every_piece) {}

  std::string Apply(std::string_view text, const StretchContext& context) const override {
    std::string result;
    size_t pos = 0;
    size_t length = 0;
    const bool trim_front = remove_extra_whitespaces_ && context.at_piece_start;
    while (trim_front && pos < text.size() && map_.Map(text.substr(pos), &length) == " ") {
      pos += length;
    }
    if (pos == text.size() && context.at_piece_end) return result;
    const bool prefix = prefix_every_piece_ ? context.at_piece_start : context.at_text_start;
    if (add_dummy_prefix_ && prefix) result.append(space_);
    bool after_space = trim_front;
    while (pos < text.size()) {
      std::string_view mapped = map_.Map(text.substr(pos), &length);
      pos += length;
      while (after_space && mapped.starts_with(" ")) mapped.remove_prefix(1);
      if (mapped.empty()) continue;
      for (const char c : mapped) {
        if (c == ' ') {
          result.append(space_);
        } else {
          result.push_back(c);
        }
      }
      after_space = remove_extra_whitespaces_ && mapped.back() == ' ';
    }
    if (remove_extra_whitespaces_ && context.at_piece_end) {
      while (result.ends_with(space_)) result.resize(result.size() - space_.size());
    }
    return result;
  }

 private:
  const CharsMap map_;
  const std::string_view space_;  // What a space is spelled as.
  const bool add_dummy_prefix_;
  const bool remove_extra_whitespaces_;
  const bool prefix_every_piece_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<const Normalizer>> MakeSentencePieceNormalizer(
    const SentencePieceModel& model, bool prefix_every_piece) {
  ASSIGN_OR_RETURN(CharsMap map, CharsMap::Parse(model.charsmap));
  return std::make_unique<const SentencePieceNormalizer>(std::move(map), model, prefix_every_piece);
}

}  // namespace writescope::tokenizer
