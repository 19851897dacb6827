#include "engine/tokenizer/detokenizer.h"

#include <gtest/gtest.h>

#include <random>

#include "engine/tokenizer/nfc.h"
#include "tests/engine/tokenizer/tokenizer_test_util.h"
#include "tests/support/seed.h"
#include "unicode/unistr.h"

namespace writescope::tokenizer {
namespace {

constexpr char kBad[] = "\xEF\xBF\xBD";  // U+FFFD

// The plain twin: all bytes together, repaired by ICU.
std::string DecodePlainly(const Tokenizer& tokenizer, const std::vector<TokenId>& ids) {
  std::string bytes;
  for (const TokenId id : ids) bytes += tokenizer.TokenBytes(id);
  std::string text;
  icu::UnicodeString::fromUTF8(bytes).toUTF8String(text);
  return text;
}

class DetokenizerTest : public testing::TestWithParam<const char*> {
 protected:
  const Tokenizer& tokenizer_ = RealTokenizer(GetParam());
};

TEST_P(DetokenizerTest, NeverHalfACharacter) {
  // Emoji take several tokens each in both vocabularies.
  const std::string text = "ok \U0001F9D1\u200d\U0001F4BB \u4e2d \U0001F3F3\ufe0f done";
  const std::vector<TokenId> ids = EncodeText(tokenizer_, text);
  IncrementalDetokenizer detokenizer(tokenizer_, /*skip_special=*/false);
  std::string joined;
  int held_back = 0;
  for (const TokenId id : ids) {
    const std::string delta = detokenizer.Push(id);
    EXPECT_EQ(delta.find(kBad), std::string::npos);
    held_back += delta.empty() ? 1 : 0;
    joined += delta;
  }
  EXPECT_GT(held_back, 0);
  EXPECT_EQ(detokenizer.Finish(), "");
  EXPECT_EQ(joined, text);
}

TEST_P(DetokenizerTest, RoundTripsText) {
  std::mt19937_64 rng(testing_support::TestSeed());
  for (int round = 0; round < 1000; ++round) {
    const std::string text = RandomText(&rng, 20);
    const std::string once =
        tokenizer_.Decode(EncodeText(tokenizer_, text), /*skip_special=*/false);
    const bool normalizes = GetParam() == std::string("qwen3");
    ASSERT_EQ(once, normalizes ? NormalizeNfc(text) : text);
  }
}

TEST_P(DetokenizerTest, AnyIdsGiveWellFormedTextOnce) {
  std::mt19937_64 rng(testing_support::TestSeed());
  for (int round = 0; round < 1000; ++round) {
    std::vector<TokenId> ids(rng() % 30);
    // Low ids are mostly single bytes; some ids are outside.
    for (TokenId& id : ids) {
      id = static_cast<TokenId>(rng() % (rng() % 2 == 0 ? 500 : 200000));
      if (rng() % 50 == 0) id = -id;
    }
    IncrementalDetokenizer detokenizer(tokenizer_, /*skip_special=*/false);
    std::string joined;
    for (const TokenId id : ids) joined += detokenizer.Push(id);
    joined += detokenizer.Finish();
    ASSERT_EQ(joined, DecodePlainly(tokenizer_, ids));
    ASSERT_EQ(joined, tokenizer_.Decode(ids, /*skip_special=*/false));
  }
}

INSTANTIATE_TEST_SUITE_P(Real, DetokenizerTest, testing::Values("qwen3", "deepseek_v3"));

TEST(DetokenizerTest, FlushesABrokenTailAndRepairsOnce) {
  auto tokenizer = LoadFiles(ByteLevelFile().dump(), "");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  IncrementalDetokenizer cut(**tokenizer, false);
  EXPECT_EQ(cut.Push(0xE6), "");
  EXPECT_EQ(cut.Push(0xAD), "");
  EXPECT_EQ(cut.Finish(), kBad);
  IncrementalDetokenizer broken(**tokenizer, false);
  EXPECT_EQ(broken.Push(0xE6), "");
  EXPECT_EQ(broken.Push('a'), kBad + std::string("a"));  // Known to be broken at once.
  EXPECT_EQ(broken.Push(0xFF), kBad);
  EXPECT_EQ(broken.Finish(), "");
}

TEST(DetokenizerTest, IdsWithoutATokenAreLeftOut) {
  auto tokenizer = LoadFiles(ByteLevelFile().dump(), "");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(
      (*tokenizer)->Decode(std::vector<TokenId>{'a', -1, 261, INT32_MAX, INT32_MIN, 'b'}, false),
      "ab");
  EXPECT_EQ((*tokenizer)->Decode(std::vector<TokenId>{'a', 259, 260}, true), "a<tool>");
  EXPECT_EQ((*tokenizer)->Decode(std::vector<TokenId>{'a', 259, 260}, false), "a<|end|><tool>");
}

TEST(DetokenizerTest, StripsTheLeadingSpaceOfATextOnly) {
  auto tokenizer = LoadFiles(CharacterFile().dump(), "");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const TokenId hi = *(*tokenizer)->TokenToId("\u2581hi");
  const std::vector<TokenId> ids = {1, hi, hi};
  EXPECT_EQ((*tokenizer)->Decode(ids, /*skip_special=*/true), "hi hi");
  EXPECT_EQ((*tokenizer)->Decode(ids, /*skip_special=*/false), "<s> hi hi");
  IncrementalDetokenizer continues(**tokenizer, true, /*at_text_start=*/false);
  EXPECT_EQ(continues.Push(hi), " hi");
}

}  // namespace
}  // namespace writescope::tokenizer
