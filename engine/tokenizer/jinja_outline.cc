#include "engine/tokenizer/jinja_outline.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_replace.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/strings.h"

namespace writescope::tokenizer {
namespace {

constexpr std::string_view kWhiteSpace = " \t\r\n\f\v";

bool IsNameChar(char c) { return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_'; }

enum class TagKind { kNone, kPrint, kBlock, kComment };

class Outliner {
 public:
  explicit Outliner(std::string_view text) : text_(text) {}

  absl::StatusOr<JinjaOutline> Run() {
    TagKind previous = TagKind::kNone;
    bool trim_left = false;  // The tag before ends with -}.
    while (pos_ < text_.size()) {
      const size_t tag = FindTag(pos_);
      const TagKind kind = KindAt(tag);
      const bool trim_right = kind != TagKind::kNone && text_.substr(tag + 2, 1) == "-";
      NoteRawText(text_.substr(pos_, tag - pos_), previous, trim_left, kind, trim_right);
      if (kind == TagKind::kNone) break;
      pos_ = tag;
      RETURN_IF_ERROR(ReadTag(kind, &trim_left));
      previous = kind;
    }
    outline_.code =
        absl::StrReplaceAll(outline_.code, {{"['role']", ".role"}, {"['content']", ".content"}});
    return std::move(outline_);
  }

 private:
  TagKind KindAt(size_t pos) const {
    const std::string_view mark = text_.substr(std::min(pos, text_.size()), 2);
    if (mark == "{{") return TagKind::kPrint;
    if (mark == "{%") return TagKind::kBlock;
    if (mark == "{#") return TagKind::kComment;
    return TagKind::kNone;
  }

  // Offset of the next tag, or the size of the text.
  size_t FindTag(size_t pos) const {
    while (pos < text_.size() && KindAt(pos) == TagKind::kNone) ++pos;
    return pos;
  }

  void NoteRawText(std::string_view raw, TagKind previous, bool trim_left, TagKind next,
                   bool trim_right) {
    if (trim_left) {
      raw.remove_prefix(std::min(raw.find_first_not_of(kWhiteSpace), raw.size()));
    } else if (previous == TagKind::kBlock || previous == TagKind::kComment) {
      if (raw.starts_with("\n")) raw.remove_prefix(1);
    }
    if (trim_right) {
      raw = raw.substr(0, raw.find_last_not_of(kWhiteSpace) + 1);
    } else if (next == TagKind::kBlock || next == TagKind::kComment) {
      const size_t line = raw.rfind('\n');
      const size_t begin = line == std::string_view::npos ? 0 : line + 1;
      const std::string_view indent = raw.substr(begin);
      const bool blank = indent.find_first_not_of(" \t") == std::string_view::npos;
      const bool at_line_start = begin > 0 || previous != TagKind::kPrint;
      if (blank && at_line_start) raw = raw.substr(0, begin);
    } else if (next == TagKind::kNone && raw.ends_with("\n")) {
      raw.remove_suffix(1);  // Jinja drops the newline that ends a file.
    }
    if (!raw.empty()) outline_.prints_raw_text = true;
  }

  absl::Status Unended(std::string_view what, size_t pos) const {
    return absl::InvalidArgumentError(
        Cat("chat template: ", what, " at byte ", pos, " has no end"));
  }

  absl::Status ReadTag(TagKind kind, bool* trims) {
    const size_t start = pos_;
    if (kind == TagKind::kComment) {
      const size_t end = text_.find("#}", pos_ + 2);
      if (end == std::string_view::npos) return Unended("a comment", start);
      *trims = text_[end - 1] == '-';
      pos_ = end + 2;
      return absl::OkStatus();
    }
    const std::string_view closing = kind == TagKind::kPrint ? "}}" : "%}";
    pos_ += 2;
    if (pos_ < text_.size() && (text_[pos_] == '-' || text_[pos_] == '+')) ++pos_;
    const size_t code_begin = outline_.code.size();
    for (;;) {
      if (pos_ >= text_.size()) return Unended("a tag", start);
      if (text_.substr(pos_, 2) == closing) break;
      const char c = text_[pos_];
      if (c == '\'' || c == '"') {
        RETURN_IF_ERROR(ReadLiteral(kind, code_begin));
        continue;
      }
      if (c == '(') NoteCall();
      if (c == '|') NoteFilter();
      if (!absl::ascii_isspace(static_cast<unsigned char>(c))) outline_.code.push_back(c);
      ++pos_;
    }
    *trims = text_[pos_ - 1] == '-';
    if (*trims) outline_.code.pop_back();
    outline_.code.push_back('\n');
    pos_ += 2;
    return absl::OkStatus();
  }

  // At a parenthesis: it may as well be one around an expression, with nothing in front.
  void NoteCall() {
    size_t begin = pos_;
    while (begin > 0 && IsNameChar(text_[begin - 1])) --begin;
    if (begin < pos_) outline_.calls.emplace(text_.substr(begin, pos_ - begin));
  }

  // At a pipe.
  void NoteFilter() {
    const size_t begin = std::min(text_.find_first_not_of(kWhiteSpace, pos_ + 1), text_.size());
    size_t end = begin;
    while (end < text_.size() && IsNameChar(text_[end])) ++end;
    outline_.filters.emplace(text_.substr(begin, end - begin));
  }

  absl::Status ReadLiteral(TagKind kind, size_t code_begin) {
    const size_t start = pos_;
    const char quote = text_[pos_++];
    std::string literal;
    for (;; ++pos_) {
      if (pos_ >= text_.size()) return Unended("a string", start);
      char c = text_[pos_];
      if (c == quote) break;
      if (c == '\\' && pos_ + 1 < text_.size()) {
        c = text_[++pos_];
        if (c == 'n') c = '\n';
        if (c == 't') c = '\t';
        if (c == 'r') c = '\r';
      }
      literal.push_back(c);
    }
    ++pos_;
    const std::string_view tag_code = std::string_view(outline_.code).substr(code_begin);
    const bool sets = kind == TagKind::kPrint || tag_code.starts_with("set");
    const bool subscript = tag_code.ends_with("[");
    const bool raises = Contains(tag_code, "raise_exception(");
    if (sets && !subscript && !raises) outline_.printed.insert(literal);
    outline_.code += Cat("'", literal, "'");
    return absl::OkStatus();
  }

  const std::string_view text_;
  size_t pos_ = 0;
  JinjaOutline outline_;
};

}  // namespace

absl::StatusOr<JinjaOutline> OutlineJinja(std::string_view text) { return Outliner(text).Run(); }

}  // namespace writescope::tokenizer
