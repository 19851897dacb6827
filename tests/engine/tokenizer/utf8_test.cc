#include "engine/tokenizer/utf8.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/engine/tokenizer/tokenizer_test_util.h"
#include "tests/support/seed.h"
#include "unicode/unistr.h"

namespace writescope::tokenizer {
namespace {

constexpr char kBad[] = "\xEF\xBF\xBD";  // U+FFFD

std::string Repair(std::string_view bytes, size_t cut) {
  Utf8Repairer repairer;
  std::string text;
  repairer.Feed(bytes.substr(0, cut), &text);
  EXPECT_EQ(FindInvalidUtf8(text), std::string_view::npos);
  repairer.Feed(bytes.substr(cut), &text);
  repairer.Finish(&text);
  return text;
}

TEST(Utf8Test, NamesTheFirstBadByte) {
  const struct {
    std::string text;
    size_t offset;
  } cases[] = {
      {"", std::string_view::npos},
      {std::string("a\0b", 3), std::string_view::npos},
      {"\u00e9\u4e2d\U0001F642", std::string_view::npos},
      {"\xF4\x8F\xBF\xBF", std::string_view::npos},  // U+10FFFF
      {"ab\xFF", 2},
      {"ab\x80", 2},
      {"a\xC3", 1},  // Cut off.
      {"a\xE4\xB8", 1},
      {"\xC0\xAF", 0},  // Overlong.
      {"\xE0\x80\xAF", 0},
      {"\xF0\x80\x80\xAF", 0},
      {"x\xED\xA0\x80", 1},     // Surrogate.
      {"\xF4\x90\x80\x80", 0},  // Above U+10FFFF.
      {"\xF8\x88\x80\x80\x80", 0},
      {"\u00e9\xC3\u00e9", 2},
  };
  for (const auto& [text, offset] : cases) EXPECT_EQ(FindInvalidUtf8(text), offset) << text;
}

TEST(Utf8Test, RoundTripsEveryCharacter) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c == 0xD800) c = 0xE000;
    std::string text;
    AppendUtf8(c, &text);
    size_t next = 0;
    ASSERT_EQ(DecodeAt(text, 0, &next), c);
    ASSERT_EQ(next, text.size());
    ASSERT_EQ(CharLength(text[0]), text.size());
    ASSERT_EQ(PreviousChar(text, text.size()), 0u);
    ASSERT_EQ(FindInvalidUtf8(text), std::string_view::npos);
  }
}

TEST(Utf8RepairerTest, ReplacesEachMaximalSubpartOnce) {
  const std::string bad = kBad;
  EXPECT_EQ(Repair("a\xE6\xAD", 2), "a" + bad);
  EXPECT_EQ(Repair("\xE6\xADz", 1), bad + "z");
  EXPECT_EQ(Repair("\xF0\x9F\x99\xF0\x9F\x99\x82", 2), bad + "\U0001F642");
  EXPECT_EQ(Repair("\xED\xA0\x80", 0), bad + bad + bad);  // No prefix of a character.
  EXPECT_EQ(Repair("\xC0\x80", 1), bad + bad);
  EXPECT_EQ(Repair("\xE6\xAD\xE6", 2), bad + bad);
}

TEST(Utf8RepairerTest, TheCutDoesNotMatter) {
  std::mt19937_64 rng(testing_support::TestSeed());
  for (int round = 0; round < 2000; ++round) {
    std::string bytes = RandomText(&rng, 6);
    for (int i = static_cast<int>(rng() % 4); i > 0 && !bytes.empty(); --i) {
      bytes[rng() % bytes.size()] = static_cast<char>(rng());
    }
    // ICU replaces by the same rule.
    std::string expected;
    icu::UnicodeString::fromUTF8(bytes).toUTF8String(expected);
    for (size_t cut = 0; cut <= bytes.size(); ++cut) ASSERT_EQ(Repair(bytes, cut), expected);
  }
}

}  // namespace
}  // namespace writescope::tokenizer
