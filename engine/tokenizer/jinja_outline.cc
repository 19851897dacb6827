#include "engine/tokenizer/jinja_outline.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_join.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/jinja_lexer.h"
#include "engine/tokenizer/strings.h"

namespace writescope::tokenizer {
namespace {

using Tokens = std::vector<std::string>;

// Conditions that are the same for all messages that Render takes.
constexpr std::array<std::string_view, 4> kNever = {
    "tools",
    "tools is defined and tools",
    "not add_generation_prompt is defined",
    "add_generation_prompt is not defined",
};
// The same where `message` is one of the messages.
constexpr std::array<std::string_view, 5> kNeverOfMessage = {
    "message . role == 'tool'",
    "message . tool_calls",
    "message . tool_calls is defined and message . tool_calls",
    "message . reasoning_content is string",
    "message . reasoning_content is defined and message . reasoning_content is not none",
};
constexpr std::string_view kAlwaysOfMessage = "message . content is string";

template <typename List>
bool IsIn(const List& list, std::string_view value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

// message['role'] as message.role.
void NameFields(Tokens* tokens) {
  for (size_t i = 1; i + 2 < tokens->size(); ++i) {
    Tokens& t = *tokens;
    if (t[i] == "[" && (t[i + 1] == "'role'" || t[i + 1] == "'content'") && t[i + 2] == "]") {
      const std::string name = *JinjaLiteral(t[i + 1]);
      t[i] = ".";
      t[i + 1] = name;
      t.erase(t.begin() + static_cast<std::ptrdiff_t>(i) + 2);
    }
  }
}

// Literals that stand beside each other in a sum of strings: with nothing else in front of them
// than a plus or the begin, and nothing else behind.
void JoinLiterals(Tokens* tokens) {
  Tokens& t = *tokens;
  for (size_t i = 0; i + 2 < t.size();) {
    const bool sums =
        (i == 0 || t[i - 1] == "+") && t[i + 1] == "+" && (i + 3 == t.size() || t[i + 3] == "+");
    const std::optional<std::string> left = JinjaLiteral(t[i]);
    const std::optional<std::string> right = JinjaLiteral(t[i + 2]);
    if (sums && left.has_value() && right.has_value()) {
      t[i] = JinjaLiteralToken(Cat(*left, *right));
      t.erase(t.begin() + static_cast<std::ptrdiff_t>(i) + 1,
              t.begin() + static_cast<std::ptrdiff_t>(i) + 3);
    } else {
      ++i;
    }
  }
}

class Outliner {
 public:
  absl::StatusOr<std::vector<JinjaStatement>> Run(std::vector<JinjaPiece> pieces) {
    for (JinjaPiece& piece : pieces) {
      piece_ = &piece;
      RETURN_IF_ERROR(Add());
    }
    if (!frames_.empty()) {
      return absl::InvalidArgumentError(
          Cat("chat template: a block at byte ", frames_.back().offset, " has no end"));
    }
    return std::move(statements_);
  }

 private:
  // A block that is open.
  struct Frame {
    bool loops = false;
    bool of_messages = false;  // Its loop binds `message`.
    bool outer_runs = true;
    bool runs = true;
    bool listed = false;  // An if: one of its conditions is in the list.
    bool closed = false;  // An if: a branch is always taken.
    bool has_else = false;
    size_t offset = 0;
  };

  bool Runs() const { return frames_.empty() || frames_.back().runs; }

  void List(std::string code) { statements_.push_back({std::move(code), piece_->source}); }

  void ListIfRuns(std::string code) {
    if (Runs()) List(std::move(code));
  }

  absl::Status Add() {
    Tokens& tokens = piece_->tokens;
    const bool is_text = piece_->kind == JinjaPieceKind::kText;
    const bool has_dictionary = IsIn(tokens, "{") || IsIn(tokens, "}");
    NameFields(&tokens);
    if (is_text) {
      piece_->source.insert(0, "the text ");
      ListIfRuns(Cat("text ", tokens[0]));
    } else if (has_dictionary) {
      List(Code(0));
    } else if (piece_->kind == JinjaPieceKind::kPrint) {
      JoinLiterals(&tokens);
      const bool raises = tokens.size() == 4 && tokens[0] == "raise_exception" &&
                          tokens[1] == "(" && JinjaLiteral(tokens[2]).has_value() &&
                          tokens[3] == ")";
      ListIfRuns(raises ? "print raise_exception" : Cat("print ", Code(0)));
    } else {
      return AddBlockTag();
    }
    return absl::OkStatus();
  }

  std::string Code(size_t first) const {
    return absl::StrJoin(piece_->tokens.begin() + static_cast<std::ptrdiff_t>(first),
                         piece_->tokens.end(), " ");
  }

  absl::Status AddBlockTag() {
    const Tokens& tokens = piece_->tokens;
    const std::string word = tokens.empty() ? "" : tokens[0];
    const bool alone = tokens.size() == 1;
    if (word == "if" && !alone) {
      OpenIf();
    } else if (word == "for" && !alone) {
      ListIfRuns(Code(0));
      const bool of_messages = tokens.size() > 2 && tokens[1] == "message" && tokens[2] == "in";
      frames_.push_back({.loops = true,
                         .of_messages = of_messages,
                         .outer_runs = Runs(),
                         .runs = Runs(),
                         .offset = piece_->offset});
    } else if (word == "set" && IsIn(tokens, "=")) {
      ListIfRuns(Code(0));
    } else if ((word == "elif" && !alone) || (word == "else" && alone)) {
      return NextBranch();
    } else if ((word == "endif" || word == "endfor") && alone) {
      return Close(word == "endfor");
    } else {
      List(Code(0));
    }
    return absl::OkStatus();
  }

  // True or false where the condition of the tag always is, for the messages that are rendered.
  std::optional<bool> Constant() const {
    const std::string condition = Code(1);
    const bool in_message = std::any_of(frames_.begin(), frames_.end(),
                                        [](const Frame& frame) { return frame.of_messages; });
    if (IsIn(kNever, condition)) return false;
    if (in_message && IsIn(kNeverOfMessage, condition)) return false;
    if (in_message && condition == kAlwaysOfMessage) return true;
    return std::nullopt;
  }

  void OpenIf() {
    const std::optional<bool> constant = Constant();
    Frame frame = {.outer_runs = Runs(), .offset = piece_->offset};
    frame.runs = frame.outer_runs && constant.value_or(true);
    frame.closed = constant.value_or(false);
    frame.listed = frame.runs && !constant.has_value();
    if (frame.listed) List(Code(0));
    frames_.push_back(frame);
  }

  absl::Status NoBlock() const {
    return absl::InvalidArgumentError(Cat("chat template: ", piece_->source, " at byte ",
                                          piece_->offset, " stands in no block that it is for"));
  }

  // At elif or else.
  absl::Status NextBranch() {
    const bool is_else = piece_->tokens[0] == "else";
    if (frames_.empty()) return NoBlock();
    Frame& frame = frames_.back();
    if (frame.has_else || (frame.loops && !is_else)) return NoBlock();
    frame.has_else = is_else;
    if (frame.loops) {
      ListIfRuns("else");
      return absl::OkStatus();
    }
    const std::optional<bool> constant = is_else ? true : Constant();
    frame.runs = frame.outer_runs && !frame.closed && constant.value_or(true);
    frame.closed = frame.closed || constant.value_or(false);
    if (!frame.runs) return absl::OkStatus();
    if (constant.has_value()) {
      if (frame.listed) List("else");
    } else {
      List(Cat(frame.listed ? "elif " : "if ", Code(1)));
      frame.listed = true;
    }
    return absl::OkStatus();
  }

  absl::Status Close(bool loop) {
    if (frames_.empty() || frames_.back().loops != loop) return NoBlock();
    const Frame frame = frames_.back();
    frames_.pop_back();
    if (loop ? frame.runs : frame.listed) List(loop ? "endfor" : "endif");
    return absl::OkStatus();
  }

  JinjaPiece* piece_ = nullptr;
  std::vector<Frame> frames_;
  std::vector<JinjaStatement> statements_;
};

}  // namespace

absl::StatusOr<std::vector<JinjaStatement>> OutlineJinja(std::string_view text) {
  ASSIGN_OR_RETURN(std::vector<JinjaPiece> pieces, LexJinja(text));
  return Outliner().Run(std::move(pieces));
}

}  // namespace writescope::tokenizer
