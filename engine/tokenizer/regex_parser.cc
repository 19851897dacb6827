#include "engine/tokenizer/regex_parser.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/strings.h"
#include "engine/tokenizer/utf8.h"
#include "unicode/unistr.h"

namespace writescope::tokenizer {
namespace {

using NodePtr = std::unique_ptr<RegexNode>;
using Kind = RegexNode::Kind;

constexpr int kMaxDepth = 50;     // Groups within groups; bounds the parser's recursion.
constexpr int kMaxRepeat = 1000;  // Bounded repeats are unrolled.
constexpr std::string_view kAssertionStarts[] = {"=", "!", "<=", "<!"};

NodePtr MakeNode(Kind kind) {
  auto node = std::make_unique<RegexNode>();
  node->kind = kind;
  return node;
}

class Parser {
 public:
  explicit Parser(std::string_view pattern) : pattern_(pattern) {}

  absl::StatusOr<RegexTree> Parse() {
    if (const size_t bad = FindInvalidUtf8(pattern_); bad != std::string_view::npos) {
      pos_ = bad;
      return Malformed("invalid UTF-8");
    }
    ASSIGN_OR_RETURN(NodePtr root, ParseAlternation(/*fold=*/false, /*depth=*/0));
    if (!AtEnd()) return Malformed("unmatched )");
    return RegexTree{std::move(root), std::move(sets_)};
  }

 private:
  bool AtEnd() const { return pos_ == pattern_.size(); }
  bool Consume(std::string_view token) {
    if (pattern_.substr(pos_, token.size()) != token) return false;
    pos_ += token.size();
    return true;
  }
  char32_t NextChar() { return DecodeAt(pattern_, pos_, &pos_); }

  absl::Status Malformed(std::string_view what) const {
    return absl::InvalidArgumentError(
        Cat("regular expression \"", pattern_, "\": ", what, " at byte ", pos_));
  }
  absl::Status Unsupported(std::string_view what) const {
    return absl::UnimplementedError(Cat("regular expression \"", pattern_, "\": ", what,
                                        " at byte ", pos_, " is not supported"));
  }

  NodePtr SetNode(icu::UnicodeSet set, bool fold) {
    if (fold) Fold(&set);
    sets_.emplace_back(set);
    NodePtr node = MakeNode(Kind::kSet);
    node->set = static_cast<int>(sets_.size()) - 1;
    return node;
  }
  static void Fold(icu::UnicodeSet* set) {
    set->closeOver(USET_CASE_INSENSITIVE);
    set->removeAllStrings();  // Folds to several characters are no member of a class.
  }

  absl::StatusOr<NodePtr> ParseAlternation(bool fold, int depth) {
    if (depth > kMaxDepth) return Unsupported("deep nesting");
    if (Consume("(?i)")) fold = true;
    NodePtr alternate = MakeNode(Kind::kAlternate);
    do {
      ASSIGN_OR_RETURN(NodePtr branch, ParseConcat(fold, depth));
      alternate->children.push_back(std::move(branch));
    } while (Consume("|"));
    if (alternate->children.size() == 1) return std::move(alternate->children.front());
    return alternate;
  }

  absl::StatusOr<NodePtr> ParseConcat(bool fold, int depth) {
    NodePtr concat = MakeNode(Kind::kConcat);
    while (!AtEnd() && pattern_[pos_] != '|' && pattern_[pos_] != ')') {
      ASSIGN_OR_RETURN(NodePtr atom, ParseAtom(fold, depth));
      ASSIGN_OR_RETURN(atom, ParseQuantifiers(std::move(atom)));
      concat->children.push_back(std::move(atom));
    }
    return concat;
  }

  absl::StatusOr<NodePtr> ParseAtom(bool fold, int depth) {
    switch (pattern_[pos_]) {
      case '(':
        return ParseGroup(fold, depth);
      case '[': {
        ASSIGN_OR_RETURN(icu::UnicodeSet set, ParseClass(fold));
        return SetNode(set, /*fold=*/false);  // Folded before it was negated.
      }
      case '.':
        ++pos_;
        return SetNode(icu::UnicodeSet('\n', '\n').complement(), false);
      case '^':
        ++pos_;
        return MakeNode(Kind::kLineStart);
      case '$':
        ++pos_;
        return MakeNode(Kind::kLineEnd);
      case '*':
      case '+':
      case '?':
        return Malformed("a quantifier with nothing to repeat");
      case '\\':
        if (Consume("\\A")) return MakeNode(Kind::kTextStart);
        if (Consume("\\z")) return MakeNode(Kind::kTextEnd);
        {
          ASSIGN_OR_RETURN(icu::UnicodeSet set, ParseEscape());
          return SetNode(set, fold);
        }
      default: {
        const auto c = static_cast<UChar32>(NextChar());
        return SetNode(icu::UnicodeSet(c, c), fold);
      }
    }
  }

  absl::StatusOr<NodePtr> ParseGroup(bool fold, int depth) {
    const size_t start = pos_;
    ++pos_;
    if (Consume("?")) {
      for (const std::string_view assertion : kAssertionStarts) {
        if (!Consume(assertion)) continue;
        return ParseLookahead(assertion, fold, depth, start);
      }
      if (Consume("i:")) {
        fold = true;
      } else if (!Consume(":")) {
        pos_ = start;
        return Unsupported("this kind of group");
      }
    }
    ASSIGN_OR_RETURN(NodePtr body, ParseAlternation(fold, depth + 1));
    if (!Consume(")")) return Malformed("missing )");
    return body;
  }

  // A look at one character needs no second search, so matching stays linear; more is refused.
  absl::StatusOr<NodePtr> ParseLookahead(std::string_view assertion, bool fold, int depth,
                                         size_t start) {
    if (assertion.front() == '<') {
      pos_ = start;
      return Unsupported("lookbehind");
    }
    ASSIGN_OR_RETURN(NodePtr body, ParseAlternation(fold, depth + 1));
    if (!Consume(")")) return Malformed("missing )");
    if (body->kind == Kind::kConcat && body->children.size() == 1) {
      body = std::move(body->children.front());
    }
    if (body->kind != Kind::kSet) {
      pos_ = start;
      return Unsupported("lookahead at more than one character");
    }
    body->kind = Kind::kLookahead;
    body->negated = assertion == "!";
    return body;
  }

  absl::StatusOr<NodePtr> ParseQuantifiers(NodePtr atom) {
    while (!AtEnd()) {
      int min = 0;
      int max = -1;
      bool interval = false;
      const size_t start = pos_;
      if (Consume("?")) {
        max = 1;
      } else if (Consume("+")) {
        min = 1;
      } else if (!Consume("*")) {
        if (!ParseInterval(&min, &max)) break;
        interval = true;
      }
      if (min > kMaxRepeat || max > kMaxRepeat) return Unsupported("so large a repeat");
      if (max >= 0 && min > max) return Malformed("an interval whose ends are swapped");
      if (atom->kind != Kind::kSet && atom->kind != Kind::kConcat &&
          atom->kind != Kind::kAlternate && atom->kind != Kind::kRepeat) {
        pos_ = start;
        return Unsupported("a repeated assertion");
      }
      NodePtr repeat = MakeNode(Kind::kRepeat);
      repeat->min = min;
      repeat->max = max;
      if (interval) {
        // In this syntax a + behind an interval repeats it again; a ? means different things in
        // different versions.
        if (!AtEnd() && pattern_[pos_] == '?') return Unsupported("? behind an interval");
      } else if (Consume("?")) {
        repeat->greed = RegexNode::Greed::kLazy;
      } else if (Consume("+")) {
        repeat->greed = RegexNode::Greed::kPossessive;
      }
      repeat->children.push_back(std::move(atom));
      atom = std::move(repeat);
    }
    return atom;
  }

  // {n}, {n,}, {n,m}, {,m}; anything else that starts with { is literal text.
  bool ParseInterval(int* min, int* max) {
    if (AtEnd() || pattern_[pos_] != '{') return false;
    size_t at = pos_ + 1;
    const auto number = [&](int* value) {
      const size_t first = at;
      *value = 0;
      while (at < pattern_.size() &&
             absl::ascii_isdigit(static_cast<unsigned char>(pattern_[at]))) {
        *value = std::min(*value * 10 + (pattern_[at++] - '0'), kMaxRepeat + 1);
      }
      return at > first;
    };
    const bool has_min = number(min);
    bool has_max = false;
    *max = *min;
    if (at < pattern_.size() && pattern_[at] == ',') {
      ++at;
      has_max = number(max);
      if (!has_max) *max = -1;
    }
    if ((!has_min && !has_max) || at >= pattern_.size() || pattern_[at] != '}') return false;
    pos_ = at + 1;
    return true;
  }

  // The set that an escape stands for; in front of a range it holds one character.
  absl::StatusOr<icu::UnicodeSet> ParseEscape() {
    ++pos_;
    if (AtEnd()) return Malformed("a lone backslash");
    const char32_t c = NextChar();
    const auto single = [](UChar32 value) { return icu::UnicodeSet(value, value); };
    switch (c) {
      case 'r':
        return single('\r');
      case 'n':
        return single('\n');
      case 't':
        return single('\t');
      case 'f':
        return single('\f');
      case 'v':
        return single('\v');
      case 'a':
        return single('\a');
      case 'e':
        return single(0x1B);
      case 's':
        return WhiteSpaceSet();
      case 'S':
        return Complement(WhiteSpaceSet());
      case 'd':
        return DecimalDigitSet();
      case 'D':
        return Complement(DecimalDigitSet());
      case 'w':
        return WordSet();
      case 'W':
        return Complement(WordSet());
      case 'p':
      case 'P':
        return ParseProperty(/*negated=*/c == 'P');
      case 'x': {
        const bool braced = Consume("{");
        ASSIGN_OR_RETURN(const UChar32 value, ParseHex(braced ? 6 : 2));
        if (braced && !Consume("}")) return Malformed("missing } of \\x{");
        return single(value);
      }
      case 'u': {
        ASSIGN_OR_RETURN(const UChar32 value, ParseHex(4));
        return single(value);
      }
      default:
        if (c < 128 && absl::ascii_isalnum(static_cast<unsigned char>(c))) {
          return Unsupported(Cat("the escape \\", std::string(1, static_cast<char>(c))));
        }
        return single(static_cast<UChar32>(c));
    }
  }

  static icu::UnicodeSet Complement(const icu::UnicodeSet& set) {
    icu::UnicodeSet thawed(0, 0x10FFFF);
    thawed.removeAll(set);
    return thawed;
  }

  absl::StatusOr<UChar32> ParseHex(int max_digits) {
    UChar32 value = 0;
    int digits = 0;
    while (digits < max_digits && !AtEnd() &&
           absl::ascii_isxdigit(static_cast<unsigned char>(pattern_[pos_]))) {
      const char c = absl::ascii_tolower(static_cast<unsigned char>(pattern_[pos_++]));
      value = value * 16 + (c <= '9' ? c - '0' : c - 'a' + 10);
      ++digits;
    }
    if (digits == 0 || value > 0x10FFFF) return Malformed("a bad character number");
    return value;
  }

  absl::StatusOr<icu::UnicodeSet> ParseProperty(bool negated) {
    if (!Consume("{")) return Malformed("\\p without {");
    if (Consume("^")) negated = !negated;
    const size_t end = pattern_.find('}', pos_);
    if (end == std::string_view::npos) return Malformed("missing } of \\p{");
    const std::string name(pattern_.substr(pos_, end - pos_));
    UErrorCode status = U_ZERO_ERROR;
    icu::UnicodeSet set;
    set.applyPropertyAlias(icu::UnicodeString::fromUTF8(name), icu::UnicodeString(), status);
    if (U_FAILURE(status)) return Unsupported(Cat("the property ", name));
    pos_ = end + 1;
    return negated ? Complement(set) : set;
  }

  absl::StatusOr<icu::UnicodeSet> ParseClass(bool fold) {
    ++pos_;
    const bool negated = Consume("^");
    icu::UnicodeSet set;
    for (bool first = true;; first = false) {
      if (AtEnd()) return Malformed("missing ]");
      if (!first && Consume("]")) break;
      if (pattern_[pos_] == '[') return Unsupported("a class within a class");
      if (pattern_.substr(pos_, 2) == "&&") return Unsupported("an intersection of classes");
      ASSIGN_OR_RETURN(icu::UnicodeSet item, ParseClassItem());
      const bool range = pos_ + 1 < pattern_.size() && pattern_[pos_] == '-' &&
                         pattern_[pos_ + 1] != ']' && item.size() == 1;
      if (range) {
        ++pos_;
        ASSIGN_OR_RETURN(const icu::UnicodeSet last, ParseClassItem());
        if (last.size() != 1 || last.charAt(0) < item.charAt(0)) return Malformed("a bad range");
        item = icu::UnicodeSet(item.charAt(0), last.charAt(0));
      }
      set.addAll(item);
    }
    if (fold) Fold(&set);
    return negated ? Complement(set) : set;
  }

  absl::StatusOr<icu::UnicodeSet> ParseClassItem() {
    if (pattern_[pos_] == '\\') return ParseEscape();
    const auto c = static_cast<UChar32>(NextChar());
    return icu::UnicodeSet(c, c);
  }

  const std::string_view pattern_;
  size_t pos_ = 0;
  std::vector<CharSet> sets_;
};

}  // namespace

absl::StatusOr<RegexTree> ParseRegex(std::string_view pattern) { return Parser(pattern).Parse(); }

}  // namespace writescope::tokenizer
