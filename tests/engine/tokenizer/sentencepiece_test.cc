// tokenizer.model: small files made by hand, damaged files, and models trained here compared with
// what spm_encode and spm_decode say.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/tokenizer/sentencepiece_wire.h"
#include "engine/tokenizer/utf8.h"
#include "tests/engine/tokenizer/tokenizer_test_util.h"
#include "tests/support/seed.h"
#include "tests/support/temp_dir.h"

namespace writescope::tokenizer {
namespace {

using Ids = std::vector<TokenId>;
using Type = SentencePieceModel::Type;

std::string Varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<char>(value | 0x80));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}
std::string Number(int field, int64_t value) {
  return Varint(static_cast<uint64_t>(field) << 3) + Varint(static_cast<uint64_t>(value));
}
std::string Bytes(int field, const std::string& bytes) {
  return Varint(static_cast<uint64_t>(field) << 3 | 2) + Varint(bytes.size()) + bytes;
}
std::string Piece(const std::string& text, float score, Type type = Type::kNormal) {
  std::string number(4, '\0');
  std::memcpy(number.data(), &score, 4);
  return Bytes(1, Bytes(1, text) + Varint(2 << 3 | 5) + number + Number(3, static_cast<int>(type)));
}

constexpr int kFirstPiece = 259;

// <unk> 0, <s> 1, </s> 2, the bytes 3..258, then `pieces`.
std::string ModelBytes(const std::string& pieces, const std::string& trainer = "",
                       const std::string& normalizer = "") {
  std::string bytes = Piece("<unk>", 0, Type::kUnknown) + Piece("<s>", 0, Type::kControl) +
                      Piece("</s>", 0, Type::kControl);
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof(name), "<0x%02X>", byte);
    bytes += Piece(name, 0, Type::kByte);
  }
  return bytes + pieces + Bytes(2, Number(3, 2) + Number(35, 1) + trainer) +
         Bytes(3, Number(4, 0) + normalizer);
}

std::string SmallPieces() {
  return Piece("\u2581a", -1) + Piece("ab", -2) + Piece("\u2581ab", -3) + Piece("\u2581", -4) +
         Piece("a", -5) + Piece("b", -6) + Piece("bx", -2);
}

std::unique_ptr<Tokenizer> LoadModel(const std::string& bytes, const std::string& config = "") {
  auto tokenizer = LoadFiles("", config, bytes);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

TEST(SentencePieceTest, MergesByScoreThenPosition) {
  const auto tokenizer = LoadModel(ModelBytes(SmallPieces()));
  const TokenId first = kFirstPiece;
  // "▁ab": ▁a (-1) goes before ab (-2); then ▁ab.
  EXPECT_EQ(EncodeText(*tokenizer, "ab"), Ids{first + 2});
  EXPECT_EQ(EncodeText(*tokenizer, "ab ab"), (Ids{first + 2, first + 2}));
  EXPECT_EQ(EncodeText(*tokenizer, "bab"), (Ids{first + 3, first + 5, first + 1}));
  // ab and bx have one score: the left one is merged. x alone is part of a piece but none itself.
  EXPECT_EQ(EncodeText(*tokenizer, "babx"), (Ids{first + 3, first + 5, first + 1, 3 + 'x'}));
  EXPECT_EQ(EncodeText(*tokenizer, "bbx"), (Ids{first + 3, first + 5, first + 6}));
  EXPECT_EQ(EncodeText(*tokenizer, "\u00e9"), (Ids{first + 3, 3 + 0xC3, 3 + 0xA9}));
  EXPECT_TRUE(EncodeText(*tokenizer, "").empty());
  EXPECT_EQ(tokenizer->Decode(Ids{1, first + 2, 3 + 0xC3, 3 + 0xA9, 2}, true), "ab\u00e9");
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_EQ(tokenizer->eos_id(), 2);
  EXPECT_TRUE(tokenizer->add_bos_by_default());
  EXPECT_EQ(tokenizer->vocab_size(), kFirstPiece + 7);
}

TEST(SentencePieceTest, ControlPiecesOnlyWhereMarked) {
  // The vocabulary could spell </s> by merging: it must not.
  const auto tokenizer =
      LoadModel(ModelBytes(SmallPieces() + Piece("<", -7) + Piece("/", -8) + Piece("s", -9) +
                           Piece(">", -10) + Piece("</", -1) + Piece("s>", -1)));
  const Ids marked = EncodeText(*tokenizer, "</s>", true);
  EXPECT_EQ(marked, Ids{2});
  const Ids plain = EncodeText(*tokenizer, "</s>", false);
  EXPECT_EQ(plain.size(), 3u);  // ▁, </, s>
  EXPECT_EQ(tokenizer->Decode(plain, true), "</s>");
}

TEST(SentencePieceTest, PrefixOfEveryPieceOrOfTheTextOnly) {
  const std::string bytes = ModelBytes(SmallPieces());
  const TokenId prefixed = kFirstPiece + 2;
  const TokenId bare = kFirstPiece + 1;
  EXPECT_EQ(EncodeText(*LoadModel(bytes), "ab</s>ab", true), (Ids{prefixed, 2, prefixed}));
  EXPECT_EQ(EncodeText(*LoadModel(bytes, R"({"legacy": false})"), "ab</s>ab", true),
            (Ids{prefixed, 2, bare}));
}

TEST(SentencePieceTest, ConfigurationMayAddTokens) {
  const std::string config =
      R"({"added_tokens_decoder": {"1": {"content": "<s>", "special": true},
                                   "300": {"content": "<tool>", "special": true}}})";
  const auto tokenizer = LoadModel(ModelBytes(SmallPieces()), config);
  EXPECT_EQ(EncodeText(*tokenizer, "<tool>", true), Ids{300});
  EXPECT_EQ(tokenizer->vocab_size(), 301);
  EXPECT_TRUE(tokenizer->IsSpecial(300));
  EXPECT_FALSE(LoadFiles("", R"({"added_tokens_decoder": {"5": {"content": "<tool>"}}})",
                         ModelBytes(SmallPieces()))
                   .ok());
}

TEST(SentencePieceTest, Refusals) {
  const struct {
    std::string bytes;
    absl::StatusCode code;
    const char* what;
  } cases[] = {
      {ModelBytes("", Number(3, 1)), absl::StatusCode::kUnimplemented, "model_type 1"},
      {ModelBytes("", Number(24, 1)), absl::StatusCode::kUnimplemented, "whitespace_as_suffix"},
      {ModelBytes(Piece("a", 0, Type::kUnused)), absl::StatusCode::kUnimplemented, "UNUSED"},
      {ModelBytes(Piece("a", 0) + Piece("a", 0)), absl::StatusCode::kInvalidArgument,
       "there twice"},
      {ModelBytes(Piece("", 0)), absl::StatusCode::kInvalidArgument, "0 bytes long"},
      {ModelBytes(Piece("\xFF", 0)), absl::StatusCode::kInvalidArgument, "invalid UTF-8"},
      {ModelBytes(Piece("a", NAN)), absl::StatusCode::kInvalidArgument, "no finite number"},
      {ModelBytes(Piece("<zz>", 0, Type::kByte)), absl::StatusCode::kInvalidArgument, "no byte"},
      {ModelBytes("", "", Bytes(2, "abcdefgh")), absl::StatusCode::kInvalidArgument, "charsmap"},
      {ModelBytes("", "", Bytes(2, "ab")), absl::StatusCode::kInvalidArgument, "charsmap"},
      {Piece("a", 0) + Bytes(2, Number(3, 2) + Number(35, 1)), absl::StatusCode::kInvalidArgument,
       "not every byte"},
      {Piece("a", 0) + Bytes(2, Number(3, 2) + Number(40, -1)), absl::StatusCode::kInvalidArgument,
       "unk_id -1"},
      {Bytes(2, Number(3, 2)), absl::StatusCode::kInvalidArgument, "no pieces"},
      {Number(1, 5), absl::StatusCode::kInvalidArgument, "wire type 0"},
      {"\x0A\xFF", absl::StatusCode::kInvalidArgument, "byte 2"},
      {std::string(12, '\xFF'), absl::StatusCode::kInvalidArgument, "ten bytes"},
  };
  for (const auto& [bytes, code, what] : cases) {
    const absl::Status status = LoadFiles("", "", bytes).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_NE(status.ToString().find(what), std::string::npos) << status << "\nlacks: " << what;
  }
}

TEST(SentencePieceTest, AnyDamageIsRefusedOrHarmless) {
  std::mt19937_64 rng(testing_support::TestSeed());
  // A map with one entry: "b" becomes "a". Unit 0 leads to unit 'b' ^ offset.
  std::string map(4 * 256, '\0');
  const auto set_unit = [&](size_t index, uint32_t unit) {
    std::memcpy(&map[4 * index], &unit, 4);
  };
  set_unit(0, 1u << 10);                        // Children at 0 ^ 1 ^ byte.
  set_unit(1 ^ 'b', 5u << 10 | 1u << 8 | 'b');  // A value at ... ^ 5.
  set_unit((1 ^ 'b') ^ 5, 1u << 31 | 0);        // Replacement at offset 0.
  std::string size(4, '\0');
  const auto map_bytes = static_cast<uint32_t>(map.size());
  std::memcpy(size.data(), &map_bytes, 4);
  const std::string charsmap = size + map + std::string("a\0", 2);
  const std::string whole = ModelBytes(SmallPieces(), "", Bytes(2, charsmap));
  EXPECT_EQ(EncodeText(*LoadModel(whole), "bb"), EncodeText(*LoadModel(whole), "aa"));
  for (int round = 0; round < 3000; ++round) {
    std::string bytes = whole;
    if (rng() % 3 == 0) bytes.resize(rng() % bytes.size());
    // Mostly in the last part, where the pieces, the map and the flags are.
    for (uint64_t i = rng() % 4; i > 0 && !bytes.empty(); --i) {
      const size_t range = rng() % 2 == 0 ? bytes.size() : std::min<size_t>(bytes.size(), 1300);
      bytes[bytes.size() - 1 - rng() % range] = static_cast<char>(rng());
    }
    const auto tokenizer = LoadFiles("", "", bytes);
    if (!tokenizer.ok()) continue;
    const Ids ids = EncodeText(**tokenizer, "ab </s> \u00e9 babx " + RandomText(&rng, 5));
    ASSERT_EQ(FindInvalidUtf8((*tokenizer)->Decode(ids, false)), std::string_view::npos);
  }
}

// --- Against the SentencePiece programs ---

bool HasPrograms() {
  return std::system("command -v spm_train spm_encode spm_decode > /dev/null 2>&1") == 0;
}

// Sentences of made-up words in several scripts, with repeats so that merges are learnt.
std::vector<std::string> MakeCorpus(std::mt19937_64* rng) {
  const std::vector<std::string> syllables = {
      "ba",     "ko",           "ri",     "sten",   "the", "ing", "qu", "\u00e9t",
      "\u00fc", "\u0436\u0438", "\u4e2d", "\u6587", "42",  "x",   "lo"};
  std::vector<std::string> words;
  for (int i = 0; i < 300; ++i) {
    std::string word;
    for (uint64_t n = 1 + (*rng)() % 4; n > 0; --n) word += syllables[(*rng)() % syllables.size()];
    words.push_back(word);
  }
  std::vector<std::string> sentences;
  for (int i = 0; i < 3000; ++i) {
    std::vector<std::string> chosen;
    for (uint64_t n = 3 + (*rng)() % 10; n > 0; --n) {
      chosen.push_back(words[std::min((*rng)() % 300, (*rng)() % 300)]);
    }
    sentences.push_back(absl::StrJoin(chosen, " ") + ((*rng)() % 3 == 0 ? ", ok." : "."));
  }
  return sentences;
}

void WriteLines(const std::string& path, const std::vector<std::string>& lines) {
  std::ofstream file(path, std::ios::binary);
  for (const std::string& line : lines) file << line << "\n";
}

std::vector<std::string> ReadLines(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

struct SpmCase {
  const char* name;
  const char* flags;
};

class SpmTest : public testing::TestWithParam<SpmCase> {};

TEST_P(SpmTest, SameIdsAndTextAsTheProgram) {
  if (!HasPrograms()) GTEST_SKIP() << "spm_train, spm_encode, spm_decode are not installed";
  std::mt19937_64 rng(testing_support::TestSeed());
  testing_support::TempDir dir;
  const std::vector<std::string> corpus = MakeCorpus(&rng);
  WriteLines(dir.File("corpus.txt"), corpus);
  const std::string train =
      absl::StrCat("cd ", dir.path(), " && spm_train --input=corpus.txt --model_prefix=tokenizer",
                   " --model_type=bpe --vocab_size=900 --hard_vocab_limit=false ", GetParam().flags,
                   " > train.log 2>&1");
  ASSERT_EQ(std::system(train.c_str()), 0) << train;
  const auto tokenizer = Tokenizer::Load(dir.path());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();

  std::vector<std::string> lines(corpus.begin(), corpus.begin() + 300);
  while (lines.size() < 1500) {
    std::string line = RandomText(&rng, 20);
    if (rng() % 2 == 0) line += "  " + corpus[rng() % corpus.size()] + " ";
    std::erase_if(line, [](char c) { return c == '\n'; });
    // The program reads lines; what it does with a NUL is its own affair.
    if (line.find('\0') == std::string::npos) lines.push_back(line);
  }
  WriteLines(dir.File("lines.txt"), lines);
  const std::string run =
      absl::StrCat("cd ", dir.path(), " && spm_encode --model=tokenizer.model --output_format=id",
                   " < lines.txt > ids.txt && spm_decode --model=tokenizer.model --input_format=id",
                   " < ids.txt > text.txt");
  ASSERT_EQ(std::system(run.c_str()), 0) << run;
  const std::vector<std::string> expected = ReadLines(dir.File("ids.txt"));
  const std::vector<std::string> decoded = ReadLines(dir.File("text.txt"));
  ASSERT_EQ(expected.size(), lines.size());
  const std::string unknown = " \u2047 ";  // How the program prints <unk>.
  for (size_t i = 0; i < lines.size(); ++i) {
    const Ids ids = EncodeText(**tokenizer, lines[i], /*allow_special=*/true);
    ASSERT_EQ(absl::StrJoin(ids, " "), expected[i]) << lines[i];
    if (decoded[i].find(unknown) != std::string::npos) continue;
    ASSERT_EQ((*tokenizer)->Decode(ids, true), decoded[i]) << lines[i];
  }
}

INSTANTIATE_TEST_SUITE_P(
    Trained, SpmTest,
    testing::Values(
        SpmCase{"identity",
                "--byte_fallback=true --normalization_rule_name=identity "
                "--remove_extra_whitespaces=false"},
        SpmCase{"nmt_nfkc", "--byte_fallback=true"},
        SpmCase{"nmt_nfkc_kept_spaces", "--byte_fallback=true --remove_extra_whitespaces=false"},
        SpmCase{"no_prefix", "--byte_fallback=true --add_dummy_prefix=false"},
        SpmCase{"unknown_pieces", "--character_coverage=0.98"},
        SpmCase{"user_defined",
                "--byte_fallback=true --normalization_rule_name=identity "
                "--remove_extra_whitespaces=false '--user_defined_symbols=ko,$,http://'"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace writescope::tokenizer
