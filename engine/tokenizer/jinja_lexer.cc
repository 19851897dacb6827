#include "engine/tokenizer/jinja_lexer.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_replace.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/strings.h"

namespace writescope::tokenizer {
namespace {

constexpr std::string_view kWhiteSpace = " \t\r\n\f\v";

bool IsNameChar(char c) { return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_'; }

enum class TagKind { kNone, kPrint, kBlock, kComment };

// Jinja reads any end of line as a newline, and drops one that ends the file.
std::string WithNewlines(std::string_view text) {
  std::string result = absl::StrReplaceAll(ToAbsl(text), {{"\r\n", "\n"}, {"\r", "\n"}});
  if (result.ends_with("\n")) result.pop_back();
  return result;
}

class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) {}

  absl::StatusOr<std::vector<JinjaPiece>> Run() {
    while (pos_ < text_.size()) {
      size_t tag = pos_;
      while (tag < text_.size() && KindAt(tag) == TagKind::kNone) ++tag;
      const TagKind kind = KindAt(tag);
      AddText(tag, kind);
      pos_ = tag;
      if (kind != TagKind::kNone) RETURN_IF_ERROR(ReadTag(kind));
    }
    return std::move(pieces_);
  }

 private:
  TagKind KindAt(size_t pos) const {
    const std::string_view mark = text_.substr(std::min(pos, text_.size()), 2);
    if (mark == "{{") return TagKind::kPrint;
    if (mark == "{%") return TagKind::kBlock;
    if (mark == "{#") return TagKind::kComment;
    return TagKind::kNone;
  }

  // The text from here to the tag at `end`, as far as it is printed.
  void AddText(size_t end, TagKind next) {
    std::string_view raw = text_.substr(pos_, end - pos_);
    const std::string_view sign =
        next == TagKind::kNone ? std::string_view() : text_.substr(end + 2, 1);
    if (sign == "-") {
      raw = raw.substr(0, raw.find_last_not_of(kWhiteSpace) + 1);
    } else if (sign != "+" && (next == TagKind::kBlock || next == TagKind::kComment)) {
      // The indent of a tag that begins its line.
      const size_t begin = raw.rfind('\n') + 1;  // 0 where there is none.
      const bool blank = raw.find_first_not_of(" \t", begin) == std::string_view::npos;
      if (blank && (begin > 0 || at_line_start_)) raw = raw.substr(0, begin);
    }
    if (raw.empty()) return;
    pieces_.push_back(
        {JinjaPieceKind::kText, {JinjaLiteralToken(raw)}, JinjaLiteralToken(raw), pos_});
  }

  absl::Status Unended(std::string_view what, size_t pos) const {
    return absl::InvalidArgumentError(
        Cat("chat template: ", what, " at byte ", pos, " has no end"));
  }

  // Behind the mark that ends a tag, whose sign of trimming stands before it.
  void EndTag(TagKind kind, char sign) {
    const size_t begin = pos_;
    if (sign == '-') {
      pos_ = std::min(text_.find_first_not_of(kWhiteSpace, pos_), text_.size());
    } else if (sign != '+' && kind != TagKind::kPrint && text_.substr(pos_, 1) == "\n") {
      ++pos_;
    }
    at_line_start_ = pos_ > begin && text_[pos_ - 1] == '\n';
  }

  void SkipSign() {
    if (pos_ < text_.size() && (text_[pos_] == '-' || text_[pos_] == '+')) ++pos_;
  }

  absl::Status ReadTag(TagKind kind) {
    const size_t start = pos_;
    pos_ += 2;
    SkipSign();
    if (kind == TagKind::kComment) {
      const size_t inside = pos_;
      const size_t end = text_.find("#}", pos_);
      if (end == std::string_view::npos) return Unended("a comment", start);
      pos_ = end + 2;
      EndTag(kind, end > inside ? text_[end - 1] : '\0');
      return absl::OkStatus();
    }
    const std::string_view closing = kind == TagKind::kPrint ? "}}" : "%}";
    JinjaPiece piece = {
        kind == TagKind::kPrint ? JinjaPieceKind::kPrint : JinjaPieceKind::kBlock, {}, {}, start};
    for (;;) {
      if (pos_ >= text_.size()) return Unended("a tag", start);
      const char sign = text_[pos_];
      const bool signs = sign == '-' || (sign == '+' && kind == TagKind::kBlock);
      if (text_.substr(pos_ + (signs ? 1 : 0), 2) == closing) {
        pos_ += signs ? 3 : 2;
        piece.source.assign(text_.substr(start, pos_ - start));
        EndTag(kind, signs ? sign : '\0');
        pieces_.push_back(std::move(piece));
        return absl::OkStatus();
      }
      RETURN_IF_ERROR(ReadToken(&piece.tokens));
    }
  }

  absl::Status ReadToken(std::vector<std::string>* tokens) {
    const char c = text_[pos_];
    if (kWhiteSpace.find(c) != std::string_view::npos) {
      ++pos_;
      return absl::OkStatus();
    }
    if (c == '\'' || c == '"') return ReadLiteral(tokens);
    size_t size = 1;
    if (IsNameChar(c)) {
      while (pos_ + size < text_.size() && IsNameChar(text_[pos_ + size])) ++size;
    } else {
      constexpr std::array<std::string_view, 6> kDoubles = {"==", "!=", "<=", ">=", "//", "**"};
      const std::string_view two = text_.substr(pos_, 2);
      if (std::find(kDoubles.begin(), kDoubles.end(), two) != kDoubles.end()) size = 2;
    }
    tokens->emplace_back(text_.substr(pos_, size));
    pos_ += size;
    return absl::OkStatus();
  }

  // Escapes that no known template has are kept as they stand.
  absl::Status ReadLiteral(std::vector<std::string>* tokens) {
    const size_t start = pos_;
    const char quote = text_[pos_++];
    std::string literal;
    for (;; ++pos_) {
      if (pos_ >= text_.size()) return Unended("a string", start);
      const char c = text_[pos_];
      if (c == quote) break;
      if (c != '\\' || pos_ + 1 == text_.size()) {
        literal.push_back(c);
        continue;
      }
      constexpr std::string_view kEscapes = "ntr\\'\"";
      constexpr std::string_view kMeanings = "\n\t\r\\'\"";
      const char escape = text_[++pos_];
      const size_t which = kEscapes.find(escape);
      if (which == std::string_view::npos) literal.push_back(c);
      literal.push_back(which == std::string_view::npos ? escape : kMeanings[which]);
    }
    ++pos_;
    tokens->push_back(JinjaLiteralToken(literal));
    return absl::OkStatus();
  }

  const std::string_view text_;
  size_t pos_ = 0;
  bool at_line_start_ = true;
  std::vector<JinjaPiece> pieces_;
};

}  // namespace

absl::StatusOr<std::vector<JinjaPiece>> LexJinja(std::string_view text) {
  const std::string lines = WithNewlines(text);
  return Lexer(lines).Run();
}

std::optional<std::string> JinjaLiteral(std::string_view token) {
  if (!token.starts_with("'")) return std::nullopt;
  std::string text;
  const std::string_view inside = token.substr(1, token.size() - 2);
  if (!absl::CUnescape(ToAbsl(inside), &text)) return std::nullopt;
  return text;
}

std::string JinjaLiteralToken(std::string_view text) {
  return Cat("'", absl::Utf8SafeCEscape(ToAbsl(text)), "'");
}

}  // namespace writescope::tokenizer
