// Files that cannot be used are refused with a text that names the place.
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "absl/strings/str_cat.h"
#include "engine/tokenizer/utf8.h"
#include "tests/engine/tokenizer/tokenizer_test_util.h"
#include "tests/support/seed.h"

namespace writescope::tokenizer {
namespace {

using Json = nlohmann::json;

absl::Status LoadStatus(const Json& file, const std::string& config = "") {
  return LoadFiles(file.dump(), config).status();
}

void ExpectRefused(const absl::Status& status, absl::StatusCode code, const std::string& what) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_NE(status.ToString().find(what), std::string::npos) << status << "\nlacks: " << what;
}

TEST(LoaderTest, TheSmallFilesThemselvesLoad) {
  EXPECT_TRUE(LoadStatus(ByteLevelFile()).ok()) << LoadStatus(ByteLevelFile());
  EXPECT_TRUE(LoadStatus(CharacterFile()).ok()) << LoadStatus(CharacterFile());
}

TEST(LoaderTest, NoTokenizerInTheFolder) {
  ExpectRefused(LoadFiles("", "").status(), absl::StatusCode::kNotFound,
                "neither tokenizer.json nor");
}

TEST(LoaderTest, EveryTruncationIsRefused) {
  const std::string whole = CharacterFile().dump();
  for (size_t size = 1; size < whole.size(); size += 1 + whole.size() / 97) {
    ExpectRefused(LoadFiles(whole.substr(0, size), "").status(), absl::StatusCode::kInvalidArgument,
                  "is not JSON");
  }
}

TEST(LoaderTest, AnyDamageIsRefusedOrHarmless) {
  std::mt19937_64 rng(testing_support::TestSeed());
  const std::string files[] = {ByteLevelFile().dump(), CharacterFile().dump()};
  int loaded = 0;
  for (int round = 0; round < 2000; ++round) {
    std::string text = files[round % 2];
    for (uint64_t i = 1 + rng() % 3; i > 0; --i) {
      // Exchanging bytes keeps more of the damage within JSON's syntax than random bytes do.
      std::swap(text[rng() % text.size()], text[rng() % text.size()]);
    }
    const auto tokenizer = LoadFiles(text, "");
    if (!tokenizer.ok()) continue;
    ++loaded;
    const std::vector<TokenId> ids =
        EncodeText(**tokenizer, "hi the ab c <s>\u00e9" + RandomText(&rng, 5), true);
    ASSERT_EQ(FindInvalidUtf8((*tokenizer)->Decode(ids, false)), std::string_view::npos);
  }
  EXPECT_GT(loaded, 50);
}

TEST(LoaderTest, DeepNestingIsRefusedNotFollowed) {
  const std::string open(1 << 20, '[');
  EXPECT_FALSE(LoadFiles(open, "").ok());
  EXPECT_FALSE(LoadFiles(open + std::string(1 << 20, ']'), "").ok());
}

TEST(LoaderTest, UnknownKindsAreNamed) {
  const struct {
    const char* field;
    Json value;
    const char* what;
  } cases[] = {
      {"normalizer", {{"type", "BertNormalizer"}}, "normalizer: the kind \"BertNormalizer\""},
      {"normalizer",
       {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}, {{"type", "NFKD"}}}}},
       "normalizer.normalizers[1]: the kind \"NFKD\""},
      {"pre_tokenizer", {{"type", "BertPreTokenizer"}}, "pre_tokenizer: the kind"},
      {"pre_tokenizer",
       {{"type", "Split"}, {"pattern", {{"Regex", "a"}}}, {"behavior", "Sideways"}},
       "behavior \"Sideways\""},
      {"pre_tokenizer",
       {{"type", "Split"}, {"pattern", {{"Regex", "(?<=a)b"}}}, {"behavior", "Isolated"}},
       "lookbehind"},
      {"pre_tokenizer",
       {{"type", "Sequence"}, {"pretokenizers", {{{"type", "ByteLevel"}}, {{"type", "Digits"}}}}},
       "behind ByteLevel"},
      {"decoder", {{"type", "WordPiece"}}, "decoder: the kind \"WordPiece\""},
      {"decoder", nullptr, "without a decoder"},
      {"decoder", {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 1}}, "Strip"},
      {"post_processor", {{"type", "RobertaProcessing"}}, "post_processor: the kind"},
      {"model", {{"type", "Unigram"}}, "\"Unigram\" is not supported"},
  };
  for (const auto& [field, value, what] : cases) {
    Json file = ByteLevelFile();
    file[field] = value;
    ExpectRefused(LoadStatus(file), absl::StatusCode::kUnimplemented, what);
  }
}

TEST(LoaderTest, WrongTypesAndMissingPartsAreNamed) {
  const struct {
    std::function<void(Json*)> damage;
    const char* what;
  } cases[] = {
      {[](Json* file) { *file = Json::array(); }, "\"model\" must be an object"},
      {[](Json* file) { file->erase("model"); }, "\"model\" must be an object, it is missing"},
      {[](Json* file) { (*file)["model"]["vocab"] = 3; }, "\"vocab\" must be an object"},
      {[](Json* file) { (*file)["model"]["vocab"] = Json::object(); }, "vocab is empty"},
      {[](Json* file) { (*file)["model"]["vocab"]["ab"] = "x"; }, "not a token id"},
      {[](Json* file) { (*file)["model"]["vocab"]["ab"] = -1; }, "not a token id"},
      {[](Json* file) { (*file)["model"]["vocab"]["ab"] = 1u << 31; }, "not a token id"},
      {[](Json* file) { (*file)["model"]["vocab"].erase("a"); }, "no token for the byte 97"},
      {[](Json* file) { (*file)["model"].erase("merges"); }, "\"merges\" must be an array"},
      {[](Json* file) { (*file)["model"]["merges"][1] = "a"; }, "merges[1]"},
      {[](Json* file) {
         (*file)["model"]["merges"][1] = {"a", 2};
       },
       "merges[1]"},
      {[](Json* file) { (*file)["model"]["merges"][1] = "x y"; }, "merges[1]: \"x\" and \"y\""},
      {[](Json* file) { (*file)["model"]["unk_token"] = "<none>"; }, "unk_token \"<none>\""},
      {[](Json* file) { (*file)["model"]["byte_fallback"] = "yes"; },
       "\"byte_fallback\" must be true"},
      {[](Json* file) { (*file)["added_tokens"] = 1; }, "\"added_tokens\" must be an array"},
      {[](Json* file) { (*file)["added_tokens"][1]["content"] = 1; }, "added_tokens[1]"},
      {[](Json* file) { (*file)["added_tokens"][1]["content"] = ""; }, "\"content\" is empty"},
      {[](Json* file) { (*file)["added_tokens"][1]["content"] = "ab"; }, "\"ab\" has id 260 here"},
      {[](Json* file) { (*file)["added_tokens"][1]["id"] = -2; }, "out of range"},
      {[](Json* file) { (*file)["added_tokens"][1]["id"] = 2000000000; }, "above the limit"},
      {[](Json* file) { (*file)["pre_tokenizer"] = nullptr; }, "ByteLevel is in only one"},
      {[](Json* file) {
         (*file)["normalizer"] = {{"type", 5}};
       },
       "\"type\" must be a string"},
      {[](Json* file) {
         (*file)["normalizer"] = {{"type", "Prepend"}};
       },
       "\"prepend\" must be"},
      {[](Json* file) {
         Json nested = {{"type", "NFC"}};
         for (int i = 0; i < 100; ++i) nested = {{"type", "Sequence"}, {"normalizers", {nested}}};
         (*file)["normalizer"] = nested;
       },
       "nested deeper"},
  };
  for (const auto& [damage, what] : cases) {
    Json file = ByteLevelFile();
    damage(&file);
    ExpectRefused(LoadStatus(file), absl::StatusCode::kInvalidArgument, what);
  }
}

TEST(LoaderTest, AVocabularyThatCannotSpellEveryTextIsRefused) {
  Json file = CharacterFile();
  file["model"].erase("unk_token");
  EXPECT_TRUE(LoadStatus(file).ok());  // All bytes are there.
  file["model"]["vocab"].erase("<0x41>");
  ExpectRefused(LoadStatus(file), absl::StatusCode::kInvalidArgument, "for the byte 65");
  file = CharacterFile();
  file["post_processor"]["special_tokens"]["<s>"]["ids"] = {100000};
  ExpectRefused(LoadStatus(file), absl::StatusCode::kInvalidArgument, "no token has id 100000");
}

TEST(LoaderTest, BrokenConfigurationIsRefused) {
  const struct {
    const char* config;
    const char* what;
  } cases[] = {
      {"{", "is not JSON"},
      {"[]", "no object"},
      {R"({"bos_token": "<missing>"})", "bos_token \"<missing>\" is not in the vocabulary"},
      {R"({"bos_token": 5})", "\"bos_token\" must be a string"},
      {R"({"eos_token": {"text": "x"}})", "\"content\" must be a string"},
      {R"({"add_bos_token": "yes"})", "\"add_bos_token\" must be true or false"},
      {R"({"add_bos_token": true})", "no bos_token is named"},
      {R"({"chat_template": 7})", "\"chat_template\" must be an array"},
      {R"({"chat_template": [{"name": "a", "template": ""}, {"name": "b", "template": ""}]})",
       "none named \"default\""},
      {R"({"added_tokens_decoder": {"x": {"content": "y"}}})", "must be a token id"},
  };
  for (const auto& [config, what] : cases) {
    ExpectRefused(LoadStatus(ByteLevelFile(), config), absl::StatusCode::kInvalidArgument, what);
  }
}

}  // namespace
}  // namespace writescope::tokenizer
