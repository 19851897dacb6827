#include "engine/tokenizer/unicode_regex.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/regex_parser.h"
#include "engine/tokenizer/strings.h"
#include "engine/tokenizer/utf8.h"

namespace writescope::tokenizer {
namespace {

using Node = RegexNode;
constexpr size_t kMaxInstructions = 20000;

bool MayBeEmpty(const Node& node) {
  const auto child_may = [](const auto& child) { return MayBeEmpty(*child); };
  switch (node.kind) {
    case Node::Kind::kSet:
      return false;
    case Node::Kind::kConcat:
      return std::all_of(node.children.begin(), node.children.end(), child_may);
    case Node::Kind::kAlternate:
      return std::any_of(node.children.begin(), node.children.end(), child_may);
    case Node::Kind::kRepeat:
      return node.min == 0 || MayBeEmpty(*node.children.front());
    default:
      return true;
  }
}

// A concatenation of one set is that set: groups leave such nodes behind.
const Node& Unwrap(const Node& node) {
  const Node* inner = &node;
  while (inner->kind == Node::Kind::kConcat && inner->children.size() == 1) {
    inner = inner->children.front().get();
  }
  return *inner;
}

}  // namespace

class UnicodeRegex::Compiler {
 public:
  absl::StatusOr<UnicodeRegex> Run(RegexTree tree) {
    RETURN_IF_ERROR(Emit(*tree.root));
    Append(Op::kMatch);
    regex_.sets_ = std::move(tree.sets);
    return std::move(regex_);
  }

 private:
  int Append(Op op) {
    Instruction instruction;
    instruction.op = op;
    regex_.program_.push_back(instruction);
    return Here() - 1;
  }
  int Here() const { return static_cast<int>(regex_.program_.size()); }
  Instruction& At(int pc) { return regex_.program_[static_cast<size_t>(pc)]; }

  absl::Status Emit(const Node& node) {
    if (regex_.program_.size() > kMaxInstructions) {
      return absl::UnimplementedError(
          Cat("a regular expression of more than ", kMaxInstructions, " steps is not supported"));
    }
    switch (node.kind) {
      case Node::Kind::kSet:
        At(Append(Op::kSet)).set = node.set;
        return absl::OkStatus();
      case Node::Kind::kConcat:
        for (const auto& child : node.children) RETURN_IF_ERROR(Emit(*child));
        return absl::OkStatus();
      case Node::Kind::kAlternate:
        return EmitAlternate(node);
      case Node::Kind::kRepeat:
        return EmitRepeat(node);
      case Node::Kind::kLookahead: {
        Instruction& look = At(Append(Op::kLookahead));
        look.set = node.set;
        look.negated = node.negated;
        return absl::OkStatus();
      }
      case Node::Kind::kLineStart:
        Append(Op::kLineStart);
        return absl::OkStatus();
      case Node::Kind::kLineEnd:
        Append(Op::kLineEnd);
        return absl::OkStatus();
      case Node::Kind::kTextStart:
        Append(Op::kTextStart);
        return absl::OkStatus();
      case Node::Kind::kTextEnd:
        Append(Op::kTextEnd);
        return absl::OkStatus();
    }
    return absl::InternalError("unknown node of a regular expression");
  }

  absl::Status EmitAlternate(const Node& node) {
    std::vector<int> jumps;
    for (size_t i = 0; i < node.children.size(); ++i) {
      if (i + 1 == node.children.size()) {
        RETURN_IF_ERROR(Emit(*node.children[i]));
        break;
      }
      const int split = Append(Op::kSplit);
      RETURN_IF_ERROR(Emit(*node.children[i]));
      jumps.push_back(Append(Op::kJump));
      At(split).first = split + 1;
      At(split).second = Here();
    }
    for (const int jump : jumps) At(jump).first = Here();
    return absl::OkStatus();
  }

  absl::Status EmitRepeat(const Node& node) {
    const Node& body = Unwrap(*node.children.front());
    const bool lazy = node.greed == Node::Greed::kLazy;
    const bool possessive = node.greed == Node::Greed::kPossessive;
    if (body.kind == Node::Kind::kSet && !lazy) {
      Instruction& loop = At(Append(possessive ? Op::kPossessiveLoop : Op::kLoop));
      loop.set = body.set;
      loop.min = node.min;
      loop.max = node.max;
      // What a bounded loop does depends on its count as well; it needs no memory, being short.
      if (node.max < 0) loop.memo = regex_.num_memos_++;
      return absl::OkStatus();
    }
    if (possessive) {
      return absl::UnimplementedError("a possessive repeat of a group is not supported");
    }
    if (node.max < 0 && MayBeEmpty(body)) {
      return absl::UnimplementedError("an unbounded repeat of what may be empty is not supported");
    }
    for (int i = 0; i < node.min; ++i) RETURN_IF_ERROR(Emit(body));
    std::vector<int> exits;
    const auto emit_split = [&](int memo) {
      const int split = Append(Op::kSplit);
      At(split).memo = memo;
      exits.push_back(split);
      return split;
    };
    if (node.max < 0) {
      const int split = emit_split(regex_.num_memos_++);
      RETURN_IF_ERROR(Emit(body));
      At(Append(Op::kJump)).first = split;
    }
    for (int i = node.min; i < node.max; ++i) {
      emit_split(-1);
      RETURN_IF_ERROR(Emit(body));
    }
    for (const int split : exits) {
      At(split).first = lazy ? Here() : split + 1;
      At(split).second = lazy ? split + 1 : Here();
    }
    return absl::OkStatus();
  }

  UnicodeRegex regex_;
};

class UnicodeRegex::Matcher {
 public:
  Matcher(const UnicodeRegex& regex, std::string_view text, Scratch* scratch)
      : regex_(regex), text_(text), failed_(scratch->failed), choices_(scratch->choices) {
    const size_t bits = static_cast<size_t>(regex.num_memos_) * (text.size() + 1);
    failed_.assign((bits + 63) / 64, 0);
  }

  // Whether a match starts at `start`; sets *end.
  bool MatchAt(size_t start, size_t* end) {
    choices_.clear();
    int pc = 0;
    size_t pos = start;
    for (;;) {
      const Instruction& op = regex_.program_[static_cast<size_t>(pc)];
      if (op.op == Op::kMatch) {
        *end = pos;
        return true;
      }
      if (!Step(op, &pc, &pos) && !Backtrack(&pc, &pos)) return false;
    }
  }

 private:
  bool Failed(int memo, size_t pos) const {
    const size_t bit = static_cast<size_t>(memo) * (text_.size() + 1) + pos;
    return (failed_[bit / 64] >> (bit % 64) & 1) != 0;
  }
  void MarkFailed(int memo, size_t pos) {
    const size_t bit = static_cast<size_t>(memo) * (text_.size() + 1) + pos;
    failed_[bit / 64] |= uint64_t{1} << (bit % 64);
  }
  bool SetMatches(int set, size_t pos, size_t* next) const {
    return pos < text_.size() &&
           regex_.sets_[static_cast<size_t>(set)].Contains(DecodeAt(text_, pos, next));
  }

  // One instruction; false: this path fails.
  bool Step(const Instruction& op, int* pc, size_t* pos) {
    switch (op.op) {
      case Op::kSet:
        if (!SetMatches(op.set, *pos, pos)) return false;
        break;
      case Op::kJump:
        *pc = op.first;
        return true;
      case Op::kSplit:
        if (op.memo >= 0) {
          if (Failed(op.memo, *pos)) return false;
          choices_.push_back({Choice::Kind::kMarkFailed, *pc, *pos, *pos});
        }
        choices_.push_back({Choice::Kind::kResume, op.second, *pos, *pos});
        *pc = op.first;
        return true;
      case Op::kLoop:
      case Op::kPossessiveLoop:
        if (!StartLoop(op, *pc, pos)) return false;
        break;
      case Op::kLookahead: {
        size_t next = 0;
        if (SetMatches(op.set, *pos, &next) == op.negated) return false;
        break;
      }
      case Op::kLineStart:
        // A newline that ends the text starts no line.
        if (*pos > 0 && (*pos == text_.size() || text_[*pos - 1] != '\n')) return false;
        break;
      case Op::kLineEnd:
        if (*pos < text_.size() && text_[*pos] != '\n') return false;
        break;
      case Op::kTextStart:
        if (*pos > 0) return false;
        break;
      case Op::kTextEnd:
        if (*pos < text_.size()) return false;
        break;
      case Op::kMatch:
        break;
    }
    ++*pc;
    return true;
  }

  bool StartLoop(const Instruction& op, int pc, size_t* pos) {
    size_t at = *pos;
    int count = 0;
    for (; count < op.min; ++count) {
      if (!SetMatches(op.set, at, &at)) return false;
    }
    if (op.memo >= 0 && Failed(op.memo, at)) return false;
    const size_t min_pos = at;
    const bool possessive = op.op == Op::kPossessiveLoop;
    size_t next = at;
    while ((op.max < 0 || count < op.max) && SetMatches(op.set, at, &next)) {
      // A loop known to fail from there on is not walked again. A possessive one would end
      // where it ended then, and fail as it did then.
      if (op.memo >= 0 && Failed(op.memo, next)) {
        if (possessive) return false;
        break;
      }
      at = next;
      ++count;
    }
    if (!possessive) {
      choices_.push_back({Choice::Kind::kLoopBack, pc, at, min_pos});
    } else if (op.memo >= 0) {
      choices_.push_back({Choice::Kind::kMarkRangeFailed, pc, at, min_pos});
    }
    *pos = at;
    return true;
  }

  // Takes up the latest choice that is open; false: there is none.
  bool Backtrack(int* pc, size_t* pos) {
    while (!choices_.empty()) {
      Choice& choice = choices_.back();
      const int memo = regex_.program_[static_cast<size_t>(choice.pc)].memo;
      switch (choice.kind) {
        case Choice::Kind::kResume:
          *pc = choice.pc;
          *pos = choice.pos;
          choices_.pop_back();
          return true;
        case Choice::Kind::kMarkFailed:
          MarkFailed(memo, choice.pos);
          choices_.pop_back();
          break;
        case Choice::Kind::kMarkRangeFailed:
          for (size_t i = choice.min_pos; i <= choice.pos; ++i) MarkFailed(memo, i);
          choices_.pop_back();
          break;
        case Choice::Kind::kLoopBack:
          if (memo >= 0) MarkFailed(memo, choice.pos);
          if (choice.pos == choice.min_pos) {
            choices_.pop_back();
            break;
          }
          choice.pos = PreviousChar(text_, choice.pos);
          *pc = choice.pc + 1;
          *pos = choice.pos;
          return true;
      }
    }
    return false;
  }

  const UnicodeRegex& regex_;
  const std::string_view text_;
  std::vector<uint64_t>& failed_;
  std::vector<Choice>& choices_;
};

absl::StatusOr<UnicodeRegex> UnicodeRegex::Compile(std::string_view pattern) {
  ASSIGN_OR_RETURN(RegexTree tree, ParseRegex(pattern));
  auto regex = Compiler().Run(std::move(tree));
  if (regex.ok()) return regex;
  return absl::Status(regex.status().code(),
                      Cat("regular expression \"", pattern, "\": ", regex.status().message()));
}

void UnicodeRegex::FindAll(std::string_view text, Scratch* scratch,
                           std::vector<Match>* matches) const {
  matches->clear();
  Matcher matcher(*this, text, scratch);
  size_t pos = 0;
  while (pos <= text.size()) {
    size_t end = 0;
    const bool found = matcher.MatchAt(pos, &end);
    const bool touches = !matches->empty() && matches->back().end == pos;
    if (found && (end > pos || !touches)) {
      matches->push_back({pos, end});
      if (end > pos) {
        pos = end;
        continue;
      }
    }
    pos += pos < text.size() ? CharLength(text[pos]) : 1;
  }
}

}  // namespace writescope::tokenizer
