#include "engine/tokenizer/byte_level.h"

#include "engine/tokenizer/utf8.h"

namespace writescope::tokenizer {
namespace {

constexpr char32_t kFirstSpare = 0x100;
constexpr char32_t kSpellingLimit = 0x144;  // 68 bytes are not printable: U+0100..U+0143.

bool SpellsItself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

struct Maps {
  std::array<std::string, 256> spelling;
  std::array<int, kSpellingLimit> byte_of;  // -1: spells no byte.
};

const Maps& GetMaps() {
  static const Maps maps = [] {
    Maps result;
    result.byte_of.fill(-1);
    char32_t spare = kFirstSpare;
    for (int byte = 0; byte < 256; ++byte) {
      const char32_t c = SpellsItself(byte) ? static_cast<char32_t>(byte) : spare++;
      AppendUtf8(c, &result.spelling[static_cast<size_t>(byte)]);
      result.byte_of[c] = byte;
    }
    return result;
  }();
  return maps;
}

}  // namespace

const std::array<std::string, 256>& ByteSpellings() { return GetMaps().spelling; }

std::string BytesOfSpelling(std::string_view token) {
  std::string bytes;
  for (size_t pos = 0; pos < token.size();) {
    const char32_t c = DecodeAt(token, pos, &pos);
    const int byte = c < kSpellingLimit ? GetMaps().byte_of[c] : -1;
    if (byte < 0) return std::string(token);
    bytes.push_back(static_cast<char>(byte));
  }
  return bytes;
}

std::string SpellingOfBytes(std::string_view bytes) {
  std::string token;
  for (const char byte : bytes) token += ByteSpellings()[static_cast<unsigned char>(byte)];
  return token;
}

}  // namespace writescope::tokenizer
