// The matcher against PCRE2, which searches by plain backtracking.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <gtest/gtest.h>
#include <pcre2.h>

#include <chrono>
#include <memory>
#include <random>

#include "engine/tokenizer/unicode_regex.h"
#include "engine/tokenizer/utf8.h"
#include "tests/engine/tokenizer/tokenizer_test_util.h"
#include "tests/support/seed.h"
#include "unicode/uchar.h"

namespace writescope::tokenizer {
namespace {

using Ranges = std::vector<std::pair<size_t, size_t>>;

class Pcre2Twin {
 public:
  explicit Pcre2Twin(const std::string& pattern) {
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                              PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error, &offset, nullptr));
    EXPECT_NE(code_, nullptr) << pattern << " at " << offset;
    data_.reset(pcre2_match_data_create_from_pattern(code_.get(), nullptr));
  }

  Ranges FindAll(const std::string& text) const {
    Ranges ranges;
    size_t pos = 0;
    while (pos <= text.size()) {
      const int count = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()),
                                    text.size(), pos, 0, data_.get(), nullptr);
      if (count == PCRE2_ERROR_NOMATCH) break;
      EXPECT_GT(count, 0);
      const PCRE2_SIZE* found = pcre2_get_ovector_pointer(data_.get());
      const bool empty = found[0] == found[1];
      if (!empty || ranges.empty() || ranges.back().second != found[0]) {
        ranges.emplace_back(found[0], found[1]);
      }
      pos = found[1];
      if (empty) pos += pos < text.size() ? CharLength(text[pos]) : 1;
    }
    return ranges;
  }

 private:
  struct Free {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
    void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
  };
  std::unique_ptr<pcre2_code, Free> code_;
  std::unique_ptr<pcre2_match_data, Free> data_;
};

Ranges FindAll(const UnicodeRegex& regex, std::string_view text) {
  UnicodeRegex::Scratch scratch;
  std::vector<UnicodeRegex::Match> matches;
  regex.FindAll(text, &scratch, &matches);
  Ranges ranges;
  for (const UnicodeRegex::Match& match : matches) ranges.emplace_back(match.begin, match.end);
  return ranges;
}

// The expressions of the known families, and others that stress the same constructs.
const std::vector<std::string>& KnownPatterns() {
  static const auto* const patterns = new std::vector<std::string>{
      // Qwen3
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
      // DeepSeek-V3
      R"(\p{N}{1,3})",
      "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
      R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
      // DeepSeek-V2 (its class of letters shortened)
      R"([\r\n])",
      "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u01ba\u01bc-\u01bf]+",
      "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
      R"(\s+$)",
      "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
      // GPT-2, GPT-4o, Llama 3
      R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
      R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
      R"([^\r\n\p{L}\p{N}]?+\p{L}++|\s*+[^\S]|.)",
      R"(^\s*\p{L}|\p{N}+$)",
      R"((?:\p{L}|\p{N})+?[\s.]|(?=\s)\s)",
  };
  return *patterns;
}

// Leaves out the characters on whose properties the two libraries differ: those that one of them is
// too old to know, and U+180E, a space to PCRE2 though no longer to Unicode.
std::string WithoutDisputed(std::string_view text) {
  std::string result;
  for (size_t pos = 0; pos < text.size();) {
    const char32_t c = DecodeAt(text, pos, &pos);
    UVersionInfo age;  // Major version first; 0: not assigned.
    u_charAge(static_cast<UChar32>(c), age);
    if (age[0] >= 1 && age[0] <= 13 && c != 0x180E) AppendUtf8(c, &result);
  }
  return result;
}

TEST(UnicodeRegexTest, KnownPatternsMatchPcre2OnRandomText) {
  std::mt19937_64 rng(testing_support::TestSeed());
  for (const std::string& pattern : KnownPatterns()) {
    const auto regex = UnicodeRegex::Compile(pattern);
    ASSERT_TRUE(regex.ok()) << regex.status();
    const Pcre2Twin twin(pattern);
    for (int round = 0; round < 500; ++round) {
      const std::string text = WithoutDisputed(RandomText(&rng, 25));
      ASSERT_EQ(FindAll(*regex, text), twin.FindAll(text)) << pattern << "\non " << text;
    }
  }
}

// A random expression over a, b, c; syntax that the two libraries read differently is left out.
std::string RandomPattern(std::mt19937_64* rng, int depth) {
  const auto pick = [&](const std::vector<std::string>& from) {
    return from[(*rng)() % from.size()];
  };
  std::string pattern;
  const int terms = 1 + static_cast<int>((*rng)() % 3);
  for (int i = 0; i < terms; ++i) {
    switch ((*rng)() % (depth > 0 ? 5 : 3)) {
      case 0:
        pattern += pick({"a", "b", "c", "[ab]", "[^a]", ".", "\\w", "(?:a)"}) +
                   pick({"", "", "*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "+?", "*+", "++"});
        break;
      case 1:
        pattern += pick({"a", "ab", "[bc]", "(?!a)", "(?=[ab])", "(?![bc])", "$", "^"});
        break;
      case 2:
        pattern += pick({"a*", "b+", "[ab]*", "c?"});
        break;
      default:
        pattern +=
            "(" + RandomPattern(rng, depth - 1) + ")" + pick({"", "", "+", "*", "?", "+?", "{2}"});
    }
  }
  if (depth > 0 && (*rng)() % 3 == 0) pattern += "|" + RandomPattern(rng, depth - 1);
  return pattern;
}

TEST(UnicodeRegexTest, RandomPatternsMatchPcre2) {
  std::mt19937_64 rng(testing_support::TestSeed());
  int compiled = 0;
  for (int round = 0; round < 3000; ++round) {
    const std::string pattern = RandomPattern(&rng, 2);
    const auto regex = UnicodeRegex::Compile(pattern);
    if (!regex.ok()) {
      // An unbounded repeat of what may be empty; nothing else is refused here.
      ASSERT_EQ(regex.status().code(), absl::StatusCode::kUnimplemented) << regex.status();
      continue;
    }
    ++compiled;
    const Pcre2Twin twin(pattern);
    for (int i = 0; i < 20; ++i) {
      std::string text(rng() % 14, 'a');
      for (char& c : text) c = "aabbc\n"[rng() % 6];
      ASSERT_EQ(FindAll(*regex, text), twin.FindAll(text)) << pattern << "\non " << text;
    }
  }
  EXPECT_GT(compiled, 1500);
}

TEST(UnicodeRegexTest, LinearWherePlainBacktrackingIsNot) {
  const struct {
    const char* pattern;
    std::string unit;
    std::string tail;
  } cases[] = {
      {R"(\s+$)", " ", "x"},  // From every space to the x.
      {R"(\s++$)", " ", "x"},
      {R"((?:a|aa)+$)", "a", "x"},  // Exponentially many ways to fail.
      {R"((?:a+)+b)", "a", "x"},
      {R"(\w*\w*\w*!)", "a", " "},
      {R"(\s*[\r\n]+|\s+(?!\S)|\s)", " ", "x"},
      {R"((?:ab?)*c)", "ab", "x"},
  };
  for (const auto& [pattern, unit, tail] : cases) {
    const auto regex = UnicodeRegex::Compile(pattern);
    ASSERT_TRUE(regex.ok()) << regex.status();
    std::string text;
    for (int i = 0; i < 1 << 20; ++i) text += unit;
    text += tail;
    const auto start = std::chrono::steady_clock::now();
    FindAll(*regex, text);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    // 2^20 steps squared would take an hour; linear is a fraction of a second.
    EXPECT_LT(elapsed.count(), 20) << pattern;
  }
}

TEST(UnicodeRegexTest, WhiteSpaceIsUnicodeWhiteSpace) {
  const auto regex = UnicodeRegex::Compile(R"(\s)");
  ASSERT_TRUE(regex.ok());
  std::string spaces;
  for (const char32_t c : {0x09, 0x0B, 0x0D, 0x20, 0x85, 0xA0, 0x1680, 0x2003, 0x2028, 0x3000}) {
    AppendUtf8(c, &spaces);
  }
  EXPECT_EQ(FindAll(*regex, spaces).size(), 10u);
  EXPECT_TRUE(FindAll(*regex, "\u180e\u200b\x1c").empty());
}

TEST(UnicodeRegexTest, WordCharactersAreOnigurumas) {
  const auto regex = UnicodeRegex::Compile(R"(\w)");
  ASSERT_TRUE(regex.ok()) << regex.status();
  // One of each kind: letters, a mark, digits, a joiner of words, letters among numbers and symbols
  // (U+2167, U+24B6), and the numbers of Latin-1 (U+00B2, U+00BD), but no others (U+2082, U+2153).
  for (const char* word :
       {"a", "é", "字", "\u0301", "7", "٣", "_", "‿", "Ⅷ", "Ⓐ", "²", "³", "¹", "¼", "½", "¾"}) {
    EXPECT_EQ(FindAll(*regex, word), (Ranges{{0, std::string(word).size()}})) << word;
  }
  for (const char* other : {" ", "-", "₂", "⅓", "①", "€", "\u200D"}) {
    EXPECT_EQ(FindAll(*regex, other), Ranges{}) << other;
  }
}

TEST(UnicodeRegexTest, RefusesByName) {
  const struct {
    const char* pattern;
    absl::StatusCode code;
    const char* what;
  } cases[] = {
      {"a(b", absl::StatusCode::kInvalidArgument, "missing )"},
      {"a)b", absl::StatusCode::kInvalidArgument, "unmatched )"},
      {"[a", absl::StatusCode::kInvalidArgument, "missing ]"},
      {"*a", absl::StatusCode::kInvalidArgument, "nothing to repeat"},
      {"a{3,2}", absl::StatusCode::kInvalidArgument, "interval"},
      {"a\\", absl::StatusCode::kInvalidArgument, "backslash"},
      {"[z-a]", absl::StatusCode::kInvalidArgument, "range"},
      {"\\x{110000}", absl::StatusCode::kInvalidArgument, "character number"},
      {"\xFF", absl::StatusCode::kInvalidArgument, "UTF-8"},
      {"\\p{NoSuchThing}", absl::StatusCode::kUnimplemented, "NoSuchThing"},
      {"(?<=a)b", absl::StatusCode::kUnimplemented, "lookbehind"},
      {"(?=ab)", absl::StatusCode::kUnimplemented, "lookahead at more than one"},
      {"(?>a)", absl::StatusCode::kUnimplemented, "kind of group"},
      {"[a[b]]", absl::StatusCode::kUnimplemented, "class within a class"},
      {"[a&&b]", absl::StatusCode::kUnimplemented, "intersection"},
      {"\\bword", absl::StatusCode::kUnimplemented, "escape \\b"},
      {"a{5000}", absl::StatusCode::kUnimplemented, "large a repeat"},
      {"(?:a*)*", absl::StatusCode::kUnimplemented, "may be empty"},
      {"(?:ab)++", absl::StatusCode::kUnimplemented, "possessive"},
      {"^*", absl::StatusCode::kUnimplemented, "assertion"},
      {"(?:(?:a{900}){900}){900}", absl::StatusCode::kUnimplemented, "steps"},
  };
  for (const auto& [pattern, code, what] : cases) {
    const auto regex = UnicodeRegex::Compile(pattern);
    EXPECT_EQ(regex.status().code(), code) << pattern << ": " << regex.status();
    EXPECT_NE(regex.status().ToString().find(what), std::string::npos) << regex.status();
  }
  EXPECT_FALSE(UnicodeRegex::Compile(std::string(5000, '(')).ok());
}

}  // namespace
}  // namespace writescope::tokenizer
