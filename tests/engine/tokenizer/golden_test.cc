// The two real tokenizers against the ids and texts that Hugging Face's library gives.
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "tests/engine/tokenizer/tokenizer_test_util.h"
#include "tests/support/seed.h"

namespace writescope::tokenizer {
namespace {

class GoldenTest : public testing::TestWithParam<const char*> {
 protected:
  const Tokenizer& tokenizer_ = RealTokenizer(GetParam());
};

TEST_P(GoldenTest, SameIdsAndText) {
  const nlohmann::json cases = ReadTestdata("tokenizer-strings.json")[GetParam()];
  ASSERT_GT(cases.size(), 20u);
  for (const auto& golden : cases) {
    const auto text = golden["text"].get<std::string>();
    const auto ids = golden["ids"].get<std::vector<TokenId>>();
    EXPECT_EQ(EncodeText(tokenizer_, text, /*allow_special=*/true), ids) << text;
    EXPECT_EQ(tokenizer_.Decode(ids, /*skip_special=*/false), golden["decoded"]) << text;
  }
}

TEST_P(GoldenTest, AnswersTwiceAlike) {
  // The second meeting of a word comes from a cache.
  const std::string text = "the cat and the dog and the 123 123 \u4e2d\u6587 \u4e2d\u6587 the cat";
  std::vector<TokenId> once = EncodeText(tokenizer_, text + "\n");
  const std::vector<TokenId> twice = EncodeText(tokenizer_, text + "\n" + text + "\n");
  once.insert(once.end(), once.begin(), once.end());
  EXPECT_EQ(once, twice);
}

TEST_P(GoldenTest, ThreadsShareOneTokenizer) {
  std::mt19937_64 rng(testing_support::TestSeed());
  std::vector<std::string> texts;
  std::vector<std::vector<TokenId>> expected;
  for (int i = 0; i < 100; ++i) {
    texts.push_back(RandomText(&rng, 30));
    expected.push_back(EncodeText(tokenizer_, texts.back()));
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (size_t i = 0; i < texts.size(); ++i) {
        EXPECT_EQ(EncodeText(tokenizer_, texts[i]), expected[i]);
        tokenizer_.Decode(expected[i], /*skip_special=*/true);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(Real, GoldenTest, testing::Values("qwen3", "deepseek_v3"));

TEST(RealTokenizerTest, Qwen3SpecialTokens) {
  const Tokenizer& tokenizer = RealTokenizer("qwen3");
  EXPECT_EQ(tokenizer.vocab_size(), 151669);
  EXPECT_EQ(tokenizer.TokenToId("<|endoftext|>"), 151643);
  EXPECT_EQ(tokenizer.eos_id(), 151645);
  EXPECT_EQ(tokenizer.bos_id(), std::nullopt);
  EXPECT_FALSE(tokenizer.add_bos_by_default());
  EXPECT_TRUE(tokenizer.IsSpecial(151644));
  EXPECT_FALSE(tokenizer.IsSpecial(151667));  // <think> is shown.
  EXPECT_EQ(tokenizer.TokenBytes(151667), "<think>");
  EXPECT_EQ(tokenizer.TokenToId("no such token"), std::nullopt);
  EXPECT_EQ(tokenizer.Encode({}, /*add_bos=*/true).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(RealTokenizerTest, DeepSeekV3PutsBosInFront) {
  const Tokenizer& tokenizer = RealTokenizer("deepseek_v3");
  EXPECT_EQ(tokenizer.vocab_size(), 128815);
  EXPECT_EQ(tokenizer.bos_id(), 0);
  EXPECT_EQ(tokenizer.eos_id(), 1);
  EXPECT_TRUE(tokenizer.add_bos_by_default());
  const Segment hello = {"Hello, world!"};
  EXPECT_EQ(*tokenizer.Encode({&hello, 1}, /*add_bos=*/true),
            (std::vector<TokenId>{0, 19923, 14, 2058, 3}));
  EXPECT_EQ(*tokenizer.Encode({}, /*add_bos=*/true), std::vector<TokenId>{0});
  EXPECT_EQ(tokenizer.Decode(std::vector<TokenId>{0, 19923, 1}, /*skip_special=*/true), "Hello");
}

}  // namespace
}  // namespace writescope::tokenizer
