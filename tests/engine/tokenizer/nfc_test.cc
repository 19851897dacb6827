#include "engine/tokenizer/nfc.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/engine/tokenizer/tokenizer_test_util.h"
#include "tests/support/seed.h"
#include "unicode/normalizer2.h"
#include "unicode/unistr.h"

namespace writescope::tokenizer {
namespace {

// The plain twin: ICU on the whole text.
std::string IcuNfc(const std::string& text) {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* nfc = icu::Normalizer2::getNFCInstance(status);
  std::string result;
  nfc->normalize(icu::UnicodeString::fromUTF8(text), status).toUTF8String(result);
  EXPECT_TRUE(U_SUCCESS(status));
  return result;
}

TEST(NfcTest, Anchors) {
  EXPECT_EQ(NormalizeNfc(""), "");
  EXPECT_EQ(NormalizeNfc("e\u0301"), "\u00e9");
  EXPECT_EQ(NormalizeNfc("a\u0301\u0323"), "\u1ea1\u0301");
  EXPECT_EQ(NormalizeNfc("\u212b"), "\u00c5");
  EXPECT_EQ(NormalizeNfc("\u1112\u1161\u11ab"), "\ud55c");
  EXPECT_EQ(NormalizeNfc("\ufb01"), "\ufb01");  // No compatibility folding.
  EXPECT_EQ(NormalizeNfc(std::string("\0e\u0301", 4)), std::string("\0\u00e9", 3));
}

TEST(NfcTest, MatchesIcuOnRandomText) {
  std::mt19937_64 rng(testing_support::TestSeed());
  for (int round = 0; round < 3000; ++round) {
    const std::string text = RandomText(&rng, 30);
    ASSERT_EQ(NormalizeNfc(text), IcuNfc(text)) << text;
  }
}

TEST(NfcTest, MatchesIcuOnLongRunsOfMarks) {
  // Marks of many classes; some decompose to two marks, some of those have class 0 themselves.
  const std::vector<std::string> marks = {"\u0301", "\u0323", "\u0344", "\u0f73",
                                          "\u0327", "\u05b0", "\u3099", "\u0340",
                                          "\u0345", "\u0f81", "\u0334"};
  const std::vector<std::string> starts = {"", "a", "\u00e9", "\u0fb2", "\u1ea1", " ", "\u304b"};
  std::mt19937_64 rng(testing_support::TestSeed());
  for (int round = 0; round < 200; ++round) {
    std::string text = starts[rng() % starts.size()];
    const size_t kinds = 1 + rng() % marks.size();
    const size_t length = 20 + rng() % 100;  // On both sides of where runs count as long.
    for (size_t i = 0; i < length; ++i) text += marks[rng() % kinds];
    text += starts[rng() % starts.size()];
    ASSERT_EQ(NormalizeNfc(text), IcuNfc(text)) << text;
  }
}

}  // namespace
}  // namespace writescope::tokenizer
