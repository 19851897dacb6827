// Text of control tokens in a user's segment stays text.
#include <gtest/gtest.h>

#include <fstream>
#include <random>
#include <set>

#include "engine/tokenizer/added_tokens.h"
#include "tests/engine/tokenizer/tokenizer_test_util.h"
#include "tests/support/seed.h"

namespace writescope::tokenizer {
namespace {

using Json = nlohmann::json;

class SegmentsTest : public testing::TestWithParam<const char*> {
 protected:
  // The added tokens that the file lists; in both real files all of them steer the model.
  void SetUp() override {
    const Json file = Json::parse(std::ifstream(RealTokenizerDir(GetParam()) + "/tokenizer.json"));
    for (const Json& token : file["added_tokens"]) {
      contents_.push_back(token["content"]);
      ids_.insert(token["id"].get<TokenId>());
    }
    ASSERT_GT(contents_.size(), 10u);
  }
  int CountAdded(const std::vector<TokenId>& ids) const {
    int count = 0;
    for (const TokenId id : ids) count += static_cast<int>(ids_.count(id));
    return count;
  }

  const Tokenizer& tokenizer_ = RealTokenizer(GetParam());
  std::vector<std::string> contents_;
  std::set<TokenId> ids_;
};

TEST_P(SegmentsTest, EveryAddedTokenOnlyWhereMarked) {
  for (const std::string& content : contents_) {
    const std::vector<TokenId> marked = EncodeText(tokenizer_, content, true);
    ASSERT_EQ(marked, std::vector<TokenId>{*tokenizer_.TokenToId(content)}) << content;
    const std::vector<TokenId> plain = EncodeText(tokenizer_, content, false);
    ASSERT_EQ(CountAdded(plain), 0) << content;
    ASSERT_EQ(tokenizer_.Decode(plain, /*skip_special=*/true), content);
  }
}

TEST_P(SegmentsTest, UserTextNeverForgesATurn) {
  std::mt19937_64 rng(testing_support::TestSeed());
  for (int round = 0; round < 500; ++round) {
    std::vector<Segment> segments;
    int marked_tokens = 0;
    for (int i = static_cast<int>(rng() % 5); i >= 0; --i) {
      const bool marked = rng() % 2 == 0;
      std::string text = "x" + RandomText(&rng, 4);
      const std::string& content = contents_[rng() % contents_.size()];
      // Cut short or whole; a cut one may seem to go on in the next segment.
      const bool whole = rng() % 2 == 0;
      text += content.substr(0, whole ? content.size() : 1);
      if (marked && whole) ++marked_tokens;
      if (rng() % 2 == 0) text += "y";
      segments.push_back({text, marked});
    }
    const auto ids = tokenizer_.Encode(segments, /*add_bos=*/false);
    ASSERT_TRUE(ids.ok()) << ids.status();
    ASSERT_EQ(CountAdded(*ids), marked_tokens);
  }
}

TEST_P(SegmentsTest, BordersDoNotChangeOrdinaryText) {
  std::mt19937_64 rng(testing_support::TestSeed());
  for (int round = 0; round < 500; ++round) {
    const std::string first = RandomText(&rng, 10);
    const std::string second = RandomText(&rng, 10);
    const std::vector<Segment> segments = {{first, false}, {"", true}, {second, false}};
    ASSERT_EQ(*tokenizer_.Encode(segments, false), EncodeText(tokenizer_, first + second));
  }
}

TEST_P(SegmentsTest, ATokenAcrossAMarkedBorderIsText) {
  const std::string& content = contents_[0];
  const std::string head = content.substr(0, 1);
  const std::string tail = content.substr(1);
  ASSERT_EQ(
      CountAdded(*tokenizer_.Encode(std::vector<Segment>{{head, true}, {tail, false}}, false)), 0);
  ASSERT_EQ(
      CountAdded(*tokenizer_.Encode(std::vector<Segment>{{head, false}, {tail, true}}, false)), 0);
  // Two marked segments are one stretch of template text.
  ASSERT_EQ(CountAdded(*tokenizer_.Encode(std::vector<Segment>{{head, true}, {tail, true}}, false)),
            1);
}

INSTANTIATE_TEST_SUITE_P(Real, SegmentsTest, testing::Values("qwen3", "deepseek_v3"));

TEST(EncodeTest, NamesSegmentAndByteOfInvalidUtf8) {
  const Tokenizer& tokenizer = RealTokenizer("qwen3");
  for (const std::string bad : {"\xE6\xAD", "\xC0\xAF", "\xED\xA0\x80", "\xF5", "\x80"}) {
    const std::vector<Segment> segments = {{"fine", true}, {"ab" + bad, false}};
    const absl::Status status = tokenizer.Encode(segments, false).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.ToString().find("segment 1 at byte 2"), std::string::npos) << status;
  }
  // Two halves do not make a whole: each segment is text of its own.
  EXPECT_FALSE(tokenizer.Encode(std::vector<Segment>{{"\xE6"}, {"\xAD\xA3"}}, false).ok());
}

TEST(EncodeTest, RefusesATextBeyondTheLimit) {
  const std::vector<Segment> segments = {{std::string(size_t{40} << 20, 'a')},
                                         {std::string(size_t{40} << 20, 'a')}};
  const absl::Status status = RealTokenizer("qwen3").Encode(segments, false).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

TEST(EncodeTest, NulAndEmptyText) {
  for (const char* name : {"qwen3", "deepseek_v3"}) {
    const Tokenizer& tokenizer = RealTokenizer(name);
    const std::string text("a\0b\0", 4);
    EXPECT_EQ(tokenizer.Decode(EncodeText(tokenizer, text), false), text);
    EXPECT_TRUE(EncodeText(tokenizer, "").empty());
    EXPECT_TRUE(tokenizer.Encode({}, false)->empty());
  }
}

// A vocabulary whose merges could spell a control token, and one that takes whole words.
TEST(EncodeTest, MergesAndWholeWordsNeverMakeAControlToken) {
  Json file = ByteLevelFile();
  file["model"]["vocab"]["<|"] = 261;
  file["model"]["vocab"]["<|e"] = 262;
  file["model"]["vocab"]["|>"] = 263;
  file["model"]["vocab"]["<|e|>"] = 264;
  file["model"]["merges"] = {"< |", "<| e", "| >", "<|e |>"};
  Json token = file["added_tokens"][0];
  token["id"] = 264;
  token["content"] = "<|e|>";
  file["added_tokens"].push_back(token);
  for (const bool ignore_merges : {false, true}) {
    file["model"]["ignore_merges"] = ignore_merges;
    const auto tokenizer = LoadFiles(file.dump(), "");
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    EXPECT_EQ(EncodeText(**tokenizer, "<|e|>", true), std::vector<TokenId>{264});
    EXPECT_EQ(EncodeText(**tokenizer, "<|e|>", false), (std::vector<TokenId>{262, 263}));
  }
}

AddedToken Token(TokenId id, std::string content) {
  AddedToken token;
  token.id = id;
  token.content = std::move(content);
  return token;
}

TEST(AddedTokenMatcherTest, LeftmostThenLongest) {
  const AddedTokenMatcher matcher(
      {Token(0, "<a"), Token(1, "<a>"), Token(2, "a>b"), Token(3, "b")});
  const std::string text = "<a>b <a b";
  const ByteRange all = {0, text.size()};
  std::vector<AddedTokenMatcher::Match> matches;
  matcher.Find(text, all, {&all, 1}, &matches);
  std::vector<TokenId> ids;
  for (const auto& match : matches) ids.push_back(match.id);
  EXPECT_EQ(ids, (std::vector<TokenId>{1, 3, 0, 3}));
}

TEST(AddedTokenMatcherTest, StripsWithinItsOwnTextOnly) {
  AddedToken token = Token(7, "<m>");
  token.lstrip = token.rstrip = true;
  const AddedTokenMatcher matcher({token});
  const std::string text = "a  <m>  b";
  const auto find = [&](ByteRange marked) {
    std::vector<AddedTokenMatcher::Match> matches;
    matcher.Find(text, {0, text.size()}, {&marked, 1}, &matches);
    EXPECT_EQ(matches.size(), 1u);
    return std::make_pair(matches[0].begin, matches[0].end);
  };
  EXPECT_EQ(find({0, text.size()}), std::make_pair(size_t{1}, size_t{8}));
  EXPECT_EQ(find({3, 6}), std::make_pair(size_t{3}, size_t{6}));  // The spaces are the user's.
}

TEST(AddedTokenMatcherTest, SingleWord) {
  AddedToken token = Token(7, "cat");
  token.single_word = true;
  const AddedTokenMatcher matcher({token});
  const std::string text = "cat concat cats cat.";
  const ByteRange all = {0, text.size()};
  std::vector<AddedTokenMatcher::Match> matches;
  matcher.Find(text, all, {&all, 1}, &matches);
  ASSERT_EQ(matches.size(), 2u);
  EXPECT_EQ(matches[0].begin, 0u);
  EXPECT_EQ(matches[1].begin, 16u);
}

TEST(AddedTokenMatcherTest, WhiteSpaceTokensAreTextEverywhere) {
  const AddedTokenMatcher matcher({Token(5, "\n\n"), Token(6, "<t>")});
  std::vector<AddedTokenMatcher::Match> matches;
  const std::string text = "a\n\n<t>";
  matcher.Find(text, {0, text.size()}, {}, &matches);
  ASSERT_EQ(matches.size(), 1u);
  EXPECT_EQ(matches[0].id, 5);
}

}  // namespace
}  // namespace writescope::tokenizer
