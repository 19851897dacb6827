#include "engine/base/utf8.h"

#include <cstddef>

namespace writescope {
namespace {

// Bytes of the character that starts at `text`; 0 when broken, `*bad` then being the bytes to
// replace.
size_t CharacterBytes(std::string_view text, size_t* bad) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  *bad = 1;
  if (lead < 0x80) return 1;
  size_t length = 0;
  unsigned char low = 0x80;  // Bounds of the second byte.
  unsigned char high = 0xbf;
  if (lead >= 0xc2 && lead <= 0xdf) {
    length = 2;
  } else if (lead >= 0xe0 && lead <= 0xef) {
    length = 3;
    if (lead == 0xe0) low = 0xa0;   // Overlong
    if (lead == 0xed) high = 0x9f;  // Surrogate
  } else if (lead >= 0xf0 && lead <= 0xf4) {
    length = 4;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
  } else {
    return 0;
  }
  for (size_t i = 1; i < length; ++i) {
    if (i >= text.size() || byte(i) < low || byte(i) > high) {
      *bad = i;
      return 0;
    }
    low = 0x80;
    high = 0xbf;
  }
  return length;
}

}  // namespace

bool IsWholeUtf8(std::string_view text) {
  size_t bad = 0;
  while (!text.empty()) {
    const size_t length = CharacterBytes(text, &bad);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string RepairUtf8(std::string_view text) {
  std::string repaired;
  repaired.reserve(text.size() + 8);
  size_t bad = 0;
  while (!text.empty()) {
    const size_t length = CharacterBytes(text, &bad);
    if (length > 0) {
      repaired.append(text.substr(0, length));
      text.remove_prefix(length);
    } else {
      repaired.append("\xef\xbf\xbd");
      text.remove_prefix(bad);
    }
  }
  return repaired;
}

}  // namespace writescope
