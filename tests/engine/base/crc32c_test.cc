#include "engine/base/crc32c.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace writescope {
namespace {

uint32_t Crc(const std::string& text, uint32_t seed = 0) {
  return Crc32c(std::as_bytes(std::span(text.data(), text.size())), seed);
}

// RFC 3720, B.4, and the check value of the catalogue of CRC algorithms.
TEST(Crc32c, PublishedVectors) {
  EXPECT_EQ(Crc(""), 0u);
  EXPECT_EQ(Crc("123456789"), 0xe3069283u);
  EXPECT_EQ(Crc(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(Crc(std::string(32, '\xff')), 0x62a8ab43u);
  std::string rising;
  std::string falling;
  for (int i = 0; i < 32; ++i) {
    rising.push_back(static_cast<char>(i));
    falling.push_back(static_cast<char>(31 - i));
  }
  EXPECT_EQ(Crc(rising), 0x46dd794eu);
  EXPECT_EQ(Crc(falling), 0x113fdb5cu);
}

uint32_t BitByBit(const std::string& text) {
  uint32_t crc = ~0u;
  for (const char c : text) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
  }
  return ~crc;
}

TEST(Crc32c, EveryLengthCutAnywhere) {
  std::string text;
  for (int length = 0; length < 70; ++length) {
    const uint32_t whole = Crc(text);
    EXPECT_EQ(whole, BitByBit(text)) << length;
    for (int cut = 0; cut <= length; cut += 3) {
      EXPECT_EQ(
          Crc(text.substr(static_cast<size_t>(cut)), Crc(text.substr(0, static_cast<size_t>(cut)))),
          whole)
          << length << " cut at " << cut;
    }
    text.push_back(static_cast<char>(length * 37 + 11));
  }
}

TEST(Crc32c, EveryFlippedBitShows) {
  std::string text(40, 'x');
  const uint32_t right = Crc(text);
  for (size_t bit = 0; bit < text.size() * 8; ++bit) {
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << bit % 8));
    EXPECT_NE(Crc(text), right) << bit;
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << bit % 8));
  }
}

}  // namespace
}  // namespace writescope
