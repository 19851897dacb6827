#include "engine/base/crc32c.h"

#include <array>

namespace writescope {
namespace {

// Eight tables, so that one step takes eight bytes (the slicing-by-8 method).
constexpr std::array<std::array<uint32_t, 256>, 8> MakeTables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
    tables[0][i] = crc;
  }
  for (uint32_t i = 0; i < 256; ++i) {
    for (size_t t = 1; t < 8; ++t) {
      const uint32_t below = tables[t - 1][i];
      tables[t][i] = tables[0][below & 0xff] ^ (below >> 8);
    }
  }
  return tables;
}

constexpr auto kTables = MakeTables();

}  // namespace

uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t seed) {
  uint32_t crc = ~seed;
  size_t i = 0;
  const auto byte = [&](size_t at) { return static_cast<uint32_t>(bytes[at]); };
  for (; i + 8 <= bytes.size(); i += 8) {
    const uint32_t low = crc ^ (byte(i) | byte(i + 1) << 8 | byte(i + 2) << 16 | byte(i + 3) << 24);
    crc = kTables[7][low & 0xff] ^ kTables[6][(low >> 8) & 0xff] ^ kTables[5][(low >> 16) & 0xff] ^
          kTables[4][low >> 24] ^ kTables[3][byte(i + 4)] ^ kTables[2][byte(i + 5)] ^
          kTables[1][byte(i + 6)] ^ kTables[0][byte(i + 7)];
  }
  for (; i < bytes.size(); ++i) crc = kTables[0][(crc ^ byte(i)) & 0xff] ^ (crc >> 8);
  return ~crc;
}

}  // namespace writescope
