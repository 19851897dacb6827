#include "tests/engine/tokenizer/tokenizer_test_util.h"

#include <fstream>
#include <map>

#include "engine/base/check.h"
#include "engine/tokenizer/byte_level.h"
#include "engine/tokenizer/utf8.h"
#include "tests/support/temp_dir.h"

namespace writescope::tokenizer {
namespace {

using nlohmann::json;

json AddedTokenSpec(TokenId id, const std::string& content, bool special) {
  return {{"id", id},        {"content", content}, {"special", special},  {"normalized", !special},
          {"lstrip", false}, {"rstrip", false},    {"single_word", false}};
}

}  // namespace

std::string RealTokenizerDir(const std::string& name) {
  return std::string(WRITESCOPE_TOKENIZERS_DIR) + "/" + name;
}

const Tokenizer& RealTokenizer(const std::string& name) {
  static auto* const loaded = new std::map<std::string, std::unique_ptr<Tokenizer>>();
  std::unique_ptr<Tokenizer>& tokenizer = (*loaded)[name];
  if (tokenizer == nullptr) {
    auto result = Tokenizer::Load(RealTokenizerDir(name));
    CHECK(result.ok()) << result.status().ToString();
    tokenizer = *std::move(result);
  }
  return *tokenizer;
}

json ReadTestdata(const std::string& name) {
  std::ifstream file(std::string(WRITESCOPE_TESTDATA_DIR) + "/" + name);
  CHECK(file.good()) << name;
  return json::parse(file);
}

json ByteLevelFile() {
  json vocab;
  for (int byte = 0; byte < 256; ++byte) vocab[ByteSpellings()[static_cast<size_t>(byte)]] = byte;
  vocab["ab"] = 256;
  vocab["abc"] = 257;
  vocab["\u0120a"] = 258;  // U+0120 spells the space.
  const json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  return {{"normalizer", nullptr},
          {"pre_tokenizer", byte_level},
          {"decoder", byte_level},
          {"post_processor", nullptr},
          {"added_tokens",
           {AddedTokenSpec(259, "<|end|>", true), AddedTokenSpec(260, "<tool>", false)}},
          {"model",
           {{"type", "BPE"},
            {"vocab", vocab},
            {"merges", {"a b", json::array({"ab", "c"}), "\u0120 a"}}}}};
}

const std::vector<std::string>& CharacterPieces() {
  static const auto* const pieces =
      new std::vector<std::string>{"\u2581", "h",        "i",  "t",  "e",       "\u2581h",
                                   "hi",     "\u2581hi", "th", "he", "\u2581t", "\u2581the"};
  return *pieces;
}

json CharacterFile() {
  json vocab = {{"<unk>", 0}, {"<s>", 1}, {"</s>", 2}};
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof(name), "<0x%02X>", byte);
    vocab[name] = 3 + byte;
  }
  for (size_t i = 0; i < CharacterPieces().size(); ++i) {
    vocab[CharacterPieces()[i]] = 259 + static_cast<int>(i);
  }
  const json replace = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "\u2581"}};
  const json back = {{"type", "Replace"}, {"pattern", {{"String", "\u2581"}}}, {"content", " "}};
  return {{"normalizer",
           {{"type", "Sequence"},
            {"normalizers", {{{"type", "Prepend"}, {"prepend", "\u2581"}}, replace}}}},
          {"pre_tokenizer", nullptr},
          {"decoder",
           {{"type", "Sequence"},
            {"decoders",
             {back,
              {{"type", "ByteFallback"}},
              {{"type", "Fuse"}},
              {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}}},
          {"post_processor",
           {{"type", "TemplateProcessing"},
            {"single",
             {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}},
              {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
            {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {1}}, {"tokens", {"<s>"}}}}}}}},
          {"added_tokens",
           {AddedTokenSpec(0, "<unk>", true), AddedTokenSpec(1, "<s>", true),
            AddedTokenSpec(2, "</s>", true)}},
          {"model",
           {{"type", "BPE"},
            {"unk_token", "<unk>"},
            {"byte_fallback", true},
            {"fuse_unk", true},
            {"vocab", vocab},
            {"merges", {"\u2581 h", "h i", "\u2581h i", "h e", "\u2581 t", "\u2581t he", "t h"}}}}};
}

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadFiles(const std::string& tokenizer_json,
                                                     const std::string& tokenizer_config,
                                                     const std::string& tokenizer_model) {
  testing_support::TempDir dir;
  const auto write = [&](const char* name, const std::string& text) {
    if (!text.empty()) std::ofstream(dir.File(name), std::ios::binary) << text;
  };
  write("tokenizer.json", tokenizer_json);
  write("tokenizer_config.json", tokenizer_config);
  write("tokenizer.model", tokenizer_model);
  return Tokenizer::Load(dir.path());
}

std::vector<TokenId> EncodeText(const Tokenizer& tokenizer, std::string_view text,
                                bool allow_special) {
  const Segment segment = {std::string(text), allow_special};
  auto ids = tokenizer.Encode({&segment, 1}, /*add_bos=*/false);
  CHECK(ids.ok()) << ids.status().ToString();
  return *std::move(ids);
}

std::string RandomText(std::mt19937_64* rng, int max_parts) {
  static const auto* const parts = new std::vector<std::string>{
      "a",      "b",          "S",      "t",          "the",    "'s",     "'LL",    "don't",
      " ",      "  ",         "     ",  "\n",         "\r\n",   "\n\n",   "\t",     "1",
      "23",     "4567",       "\u0663", "\u00bd",     "\u2167", "\u00b2", "\u4e2d", "\u6587\u5b57",
      "\u306e", "\u30ab",     "\ud55c", "e\u0301",    "\u00e9", "\u0301", "\u0323", "\u0344",
      "\u0f73", "\u1161",     "\u11a8", "\U0001F642", "\u200d", "\ufe0f", "\u00a0", "\u3000",
      "\u2028", "\u0085",     "\u200b", ".",          ",",      "!?",     "()",     "#",
      "$",      "_",          "-",      "=",          "/",      "\u20ac", "\u00ab", "\u2014",
      "\u0e33", "\u017f",     "\u212a", "\u00df",     "\x01",   "\x7f",   "\ufeff", "http://",
      "x=",     "\U00010400", "\u09be", "\u0958",     "\ufb01", "\u201c", "\u2003", "\u2581",
      "<",      "|",          ">",      "<|",         "|>"};
  std::string text;
  const int count = static_cast<int>((*rng)() % static_cast<uint64_t>(max_parts + 1));
  for (int i = 0; i < count; ++i) {
    if ((*rng)() % 8 != 0) {
      text += (*parts)[(*rng)() % parts->size()];
      continue;
    }
    char32_t c = static_cast<char32_t>((*rng)() % ((*rng)() % 2 == 0 ? 0x3000 : 0x20000));
    if (c >= 0xD800 && c < 0xE000) c = 0;
    AppendUtf8(c, &text);
  }
  return text;
}

}  // namespace writescope::tokenizer
