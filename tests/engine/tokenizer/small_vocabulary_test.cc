// Small vocabularies made by hand, whose ids can be worked out on paper: what the real files do not
// use.
#include <gtest/gtest.h>

#include "tests/engine/tokenizer/tokenizer_test_util.h"

namespace writescope::tokenizer {
namespace {

using Json = nlohmann::json;
using Ids = std::vector<TokenId>;

std::unique_ptr<Tokenizer> Load(const Json& file, const std::string& config = "") {
  auto tokenizer = LoadFiles(file.dump(), config);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

TEST(ByteLevelTest, BothSpellingsOfMerges) {
  const auto tokenizer = Load(ByteLevelFile());
  EXPECT_EQ(EncodeText(*tokenizer, "abcab a"), (Ids{257, 256, 258}));
  EXPECT_EQ(EncodeText(*tokenizer, "\u00e9"), (Ids{0xC3, 0xA9}));
  EXPECT_EQ(tokenizer->Decode(Ids{257, 258, 0xC3, 0xA9}, false), "abc a\u00e9");
  EXPECT_EQ(tokenizer->TokenBytes(258), " a");
  EXPECT_EQ(tokenizer->TokenToId("\u0120a"), 258);
}

// The words that a step cuts a text into. Every part of the text is a token, and a word that is a
// token is taken whole.
std::vector<std::string> Words(const Json& step, const std::string& text) {
  Json file = ByteLevelFile();
  file["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {step, file["pre_tokenizer"]}}};
  file["model"]["ignore_merges"] = true;
  Json& vocab = file["model"]["vocab"];
  for (size_t begin = 0; begin < text.size(); ++begin) {
    for (size_t length = 2; begin + length <= text.size(); ++length) {
      const std::string part = text.substr(begin, length);
      if (!vocab.contains(part)) vocab[part] = 300 + vocab.size();
    }
  }
  const auto tokenizer = Load(file);
  std::vector<std::string> words;
  for (const TokenId id : EncodeText(*tokenizer, text)) {
    words.emplace_back(tokenizer->TokenBytes(id));
  }
  return words;
}

Json SplitStep(const std::string& pattern, const std::string& behavior, bool invert = false) {
  return {{"type", "Split"},
          {"pattern", {{"Regex", pattern}}},
          {"behavior", behavior},
          {"invert", invert}};
}

TEST(PreTokenizerTest, SplitBehaviors) {
  using List = std::vector<std::string>;
  EXPECT_EQ(Words(SplitStep("-", "Isolated"), "a-b--a"), (List{"a", "-", "b", "-", "-", "a"}));
  EXPECT_EQ(Words(SplitStep("-", "Removed"), "a-b--a"), (List{"a", "b", "a"}));
  EXPECT_EQ(Words(SplitStep("-", "MergedWithPrevious"), "a-b--a"), (List{"a-", "b-", "-", "a"}));
  EXPECT_EQ(Words(SplitStep("-", "MergedWithNext"), "a-b--a"), (List{"a", "-b", "-", "-a"}));
  EXPECT_EQ(Words(SplitStep("-", "Contiguous"), "a-b--a"), (List{"a", "-", "b", "--", "a"}));
  EXPECT_EQ(Words(SplitStep("[ab]+", "Removed", /*invert=*/true), "a-b--a"), (List{"a", "b", "a"}));
  EXPECT_EQ(Words(SplitStep("-", "MergedWithPrevious"), "-a-"), (List{"-", "a-"}));
  EXPECT_EQ(Words(SplitStep("-", "MergedWithNext"), "-a-"), (List{"-a", "-"}));
}

TEST(PreTokenizerTest, Digits) {
  const auto digits = [](bool individual) {
    return Json{{"type", "Digits"}, {"individual_digits", individual}};
  };
  EXPECT_EQ(Words(digits(true), "a11b1"), (std::vector<std::string>{"a", "1", "1", "b", "1"}));
  EXPECT_EQ(Words(digits(false), "a11b1"), (std::vector<std::string>{"a", "11", "b", "1"}));
}

TEST(PreTokenizerTest, ByteLevelPrefixSpace) {
  Json file = ByteLevelFile();
  file["pre_tokenizer"]["add_prefix_space"] = true;
  EXPECT_EQ(EncodeText(*Load(file), "a"), Ids{258});
  EXPECT_EQ(EncodeText(*Load(file), " a"), Ids{258});
}

TEST(CharacterTest, PrefixMergesAndFallback) {
  const auto tokenizer = Load(CharacterFile());
  const auto id = [&](const char* piece) { return *tokenizer->TokenToId(piece); };
  EXPECT_EQ(EncodeText(*tokenizer, "hi the"), (Ids{id("\u2581hi"), id("\u2581the")}));
  // A character without a piece is its bytes.
  EXPECT_EQ(EncodeText(*tokenizer, "\u00e9"), (Ids{id("\u2581"), 3 + 0xC3, 3 + 0xA9}));
  EXPECT_EQ(tokenizer->Decode(EncodeText(*tokenizer, " hi \u00e9"), true), " hi \u00e9");
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_TRUE(tokenizer->add_bos_by_default());
  const Segment text = {"hi"};
  EXPECT_EQ(*tokenizer->Encode({&text, 1}, true), (Ids{1, id("\u2581hi")}));
  // Text behind a control token gets the prefix again, as the file's normaliser says.
  EXPECT_EQ(EncodeText(*tokenizer, "hi</s>hi", true), (Ids{id("\u2581hi"), 2, id("\u2581hi")}));
}

TEST(CharacterTest, UnknownWithoutFallbackIsFused) {
  Json file = CharacterFile();
  file["model"]["byte_fallback"] = false;
  EXPECT_EQ(EncodeText(*Load(file), "hi\u00e9\u00e8hi").size(), 3u);
  file["model"]["fuse_unk"] = false;
  EXPECT_EQ(EncodeText(*Load(file), "hi\u00e9\u00e8hi").size(), 4u);
}

TEST(CharacterTest, MetaspacePrefixesFirstWordOnly) {
  Json file = CharacterFile();
  file["normalizer"] = nullptr;
  file["pre_tokenizer"] = {{"type", "Metaspace"},
                           {"replacement", "\u2581"},
                           {"prepend_scheme", "first"},
                           {"split", false}};
  const auto tokenizer = Load(file);
  const TokenId prefixed = *tokenizer->TokenToId("\u2581hi");
  const TokenId bare = *tokenizer->TokenToId("hi");
  EXPECT_EQ(EncodeText(*tokenizer, "hi hi</s>hi", true), (Ids{prefixed, prefixed, 2, bare}));
}

TEST(ConfigTest, BosEosAndItsDefault) {
  const std::string config = R"({"bos_token": {"content": "<|end|>"}, "eos_token": "<tool>"})";
  auto tokenizer = Load(ByteLevelFile(), config);
  EXPECT_EQ(tokenizer->bos_id(), 259);
  EXPECT_EQ(tokenizer->eos_id(), 260);
  EXPECT_FALSE(tokenizer->add_bos_by_default());
  tokenizer = Load(ByteLevelFile(), R"({"bos_token": "<|end|>", "add_bos_token": true})");
  EXPECT_TRUE(tokenizer->add_bos_by_default());
  tokenizer = Load(CharacterFile(), R"({"add_bos_token": false})");
  EXPECT_FALSE(tokenizer->add_bos_by_default());
}

}  // namespace
}  // namespace writescope::tokenizer
