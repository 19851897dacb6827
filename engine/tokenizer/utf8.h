// UTF-8 by hand: validation with a byte offset, decoding of text known to be well formed, and
// repair of a byte stream that may be broken or cut anywhere.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace writescope::tokenizer {

// Offset of the first byte that does not belong to well-formed UTF-8 (overlong forms, surrogates
// and values above U+10FFFF are ill formed; NUL is fine), or std::string_view::npos.
size_t FindInvalidUtf8(std::string_view text);

// Bytes of the character that starts with `lead`, which must be the first byte of a character in
// well-formed text.
inline size_t CharLength(char lead) {
  const auto byte = static_cast<unsigned char>(lead);
  if (byte < 0x80) return 1;
  if (byte < 0xE0) return 2;
  return byte < 0xF0 ? 3 : 4;
}

// The character at `pos` of well-formed text; sets *next to the offset behind it.
inline char32_t DecodeAt(std::string_view text, size_t pos, size_t* next) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(text[pos + i]); };
  const unsigned char lead = at(0);
  if (lead < 0x80) {
    *next = pos + 1;
    return lead;
  }
  if (lead < 0xE0) {
    *next = pos + 2;
    return static_cast<char32_t>((lead & 0x1F) << 6 | (at(1) & 0x3F));
  }
  if (lead < 0xF0) {
    *next = pos + 3;
    return static_cast<char32_t>((lead & 0x0F) << 12 | (at(1) & 0x3F) << 6 | (at(2) & 0x3F));
  }
  *next = pos + 4;
  return static_cast<char32_t>((lead & 0x07) << 18 | (at(1) & 0x3F) << 12 | (at(2) & 0x3F) << 6 |
                               (at(3) & 0x3F));
}

// Offset of the character that ends at `pos` > 0 of well-formed text.
inline size_t PreviousChar(std::string_view text, size_t pos) {
  do --pos;
  while ((static_cast<unsigned char>(text[pos]) & 0xC0) == 0x80);
  return pos;
}

void AppendUtf8(char32_t character, std::string* out);

// Turns any byte stream, cut anywhere, into well-formed UTF-8. An ill-formed sequence becomes one
// U+FFFD per maximal subpart, as the Unicode standard recommends; a sequence that may still become
// whole is held back. The text depends on the bytes only, not on where they were cut.
class Utf8Repairer {
 public:
  // Appends what `bytes` completes to *out.
  void Feed(std::string_view bytes, std::string* out);
  // The stream has ended: appends U+FFFD if a sequence was cut off.
  void Finish(std::string* out);

 private:
  std::string held_;          // Up to three bytes of a sequence that may still become whole.
  int missing_ = 0;           // Continuation bytes that held_ waits for.
  unsigned char low_ = 0x80;  // Bounds of the next continuation byte.
  unsigned char high_ = 0xBF;
};

}  // namespace writescope::tokenizer
