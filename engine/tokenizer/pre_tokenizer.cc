#include "engine/tokenizer/pre_tokenizer.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_replace.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/json_fields.h"
#include "engine/tokenizer/strings.h"

namespace writescope::tokenizer {
namespace {

constexpr int kMaxDepth = 16;  // Sequences within sequences.

// What ByteLevel splits by when it is told to use its own expression: that of GPT-2.
constexpr std::string_view kByteLevelRegex =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

}  // namespace

absl::StatusOr<PreTokenizer> PreTokenizer::FromJson(const nlohmann::json& spec) {
  PreTokenizer result;
  if (!spec.is_null()) RETURN_IF_ERROR(result.AddSteps(spec, "pre_tokenizer", 0));
  return result;
}

absl::Status PreTokenizer::AddSteps(const Json& spec, std::string_view where, int depth) {
  if (depth > kMaxDepth) {
    return absl::InvalidArgumentError(Cat(where, ": nested deeper than ", kMaxDepth));
  }
  ASSIGN_OR_RETURN(const std::string type_text, RequireString(spec, "type", where));
  const std::string_view type = type_text;
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(const Json* specs, RequireArray(spec, "pretokenizers", where));
    for (size_t i = 0; i < specs->size(); ++i) {
      RETURN_IF_ERROR(AddSteps((*specs)[i], Cat(where, ".pretokenizers[", i, "]"), depth + 1));
    }
    return absl::OkStatus();
  }
  if (byte_level_) {
    return absl::UnimplementedError(
        Cat(where, ": the kind \"", type, "\" behind ByteLevel is not supported"));
  }
  if (type == "Split") return AddSplit(spec, where);
  if (type == "ByteLevel") return AddByteLevel(spec, where);
  if (type == "Metaspace") return AddMetaspace(spec, where);
  if (type == "Digits") {
    ASSIGN_OR_RETURN(const bool individual, BoolOr(spec, "individual_digits", false, where));
    ASSIGN_OR_RETURN(TextPattern digit, TextPattern::FromRegex(R"(\p{N})"));
    steps_.push_back(SplitStep{std::move(digit),
                               individual ? Behavior::kIsolated : Behavior::kContiguous, false});
    return absl::OkStatus();
  }
  return absl::UnimplementedError(Cat(where, ": the kind \"", type, "\" is not supported"));
}

absl::Status PreTokenizer::AddSplit(const Json& spec, std::string_view where) {
  ASSIGN_OR_RETURN(TextPattern pattern, TextPattern::FromJson(spec, where));
  ASSIGN_OR_RETURN(const std::string name, RequireString(spec, "behavior", where));
  ASSIGN_OR_RETURN(const bool invert, BoolOr(spec, "invert", false, where));
  constexpr std::pair<std::string_view, Behavior> kBehaviors[] = {
      {"Removed", Behavior::kRemoved},
      {"Isolated", Behavior::kIsolated},
      {"MergedWithPrevious", Behavior::kMergedWithPrevious},
      {"MergedWithNext", Behavior::kMergedWithNext},
      {"Contiguous", Behavior::kContiguous},
  };
  for (const auto& [known, behavior] : kBehaviors) {
    if (name != known) continue;
    steps_.push_back(SplitStep{std::move(pattern), behavior, invert});
    return absl::OkStatus();
  }
  return absl::UnimplementedError(Cat(where, ": the behavior \"", name, "\" is not supported"));
}

absl::Status PreTokenizer::AddByteLevel(const Json& spec, std::string_view where) {
  ASSIGN_OR_RETURN(const bool add_prefix_space, BoolOr(spec, "add_prefix_space", true, where));
  ASSIGN_OR_RETURN(const bool use_regex, BoolOr(spec, "use_regex", true, where));
  if (add_prefix_space) steps_.push_back(PrefixStep{" ", PrefixStep::Where::kAlways});
  if (use_regex) {
    ASSIGN_OR_RETURN(TextPattern pattern, TextPattern::FromRegex(kByteLevelRegex));
    steps_.push_back(SplitStep{std::move(pattern), Behavior::kIsolated, false});
  }
  byte_level_ = true;
  return absl::OkStatus();
}

absl::Status PreTokenizer::AddMetaspace(const Json& spec, std::string_view where) {
  ASSIGN_OR_RETURN(const std::string space, RequireString(spec, "replacement", where));
  ASSIGN_OR_RETURN(const bool split, BoolOr(spec, "split", true, where));
  // Older files say add_prefix_space, newer ones prepend_scheme.
  ASSIGN_OR_RETURN(const bool add_prefix, BoolOr(spec, "add_prefix_space", true, where));
  ASSIGN_OR_RETURN(const std::string scheme,
                   StringOr(spec, "prepend_scheme", add_prefix ? "always" : "never", where));
  PrefixStep prefix{space, PrefixStep::Where::kAlways};
  if (scheme == "never") {
    prefix.where = PrefixStep::Where::kNever;
  } else if (scheme == "first") {
    prefix.where = PrefixStep::Where::kFirst;
  } else if (scheme != "always") {
    return absl::UnimplementedError(
        Cat(where, ": the prepend_scheme \"", scheme, "\" is not supported"));
  }
  steps_.push_back(prefix);
  if (split) {
    const Json pattern = {{"pattern", {{"String", space}}}};
    ASSIGN_OR_RETURN(TextPattern space_pattern, TextPattern::FromJson(pattern, where));
    steps_.push_back(SplitStep{std::move(space_pattern), Behavior::kMergedWithNext, false});
  }
  return absl::OkStatus();
}

void PreTokenizer::Split(std::string_view text, bool at_text_start, Scratch* scratch,
                         std::deque<std::string>* storage,
                         std::vector<std::string_view>* words) const {
  words->clear();
  if (!text.empty()) words->push_back(text);
  for (const auto& step : steps_) {
    std::vector<std::string_view>& next = scratch->next;
    next.clear();
    if (const auto* split = std::get_if<SplitStep>(&step)) {
      for (const std::string_view word : *words) ApplySplit(*split, word, scratch, &next);
    } else {
      const auto& prefix = std::get<PrefixStep>(step);
      for (const std::string_view word : *words) {
        std::string changed(word);
        if (prefix.space != " ") absl::StrReplaceAll({{" ", prefix.space}}, &changed);
        const bool first = at_text_start && next.empty();
        const bool wanted = prefix.where == PrefixStep::Where::kAlways ||
                            (prefix.where == PrefixStep::Where::kFirst && first);
        if (wanted && !changed.starts_with(prefix.space)) {
          changed.insert(0, prefix.space);
        }
        next.emplace_back(storage->emplace_back(std::move(changed)));
      }
    }
    words->swap(next);
  }
}

void PreTokenizer::ApplySplit(const SplitStep& step, std::string_view text, Scratch* scratch,
                              std::vector<std::string_view>* words) {
  step.pattern.FindAll(text, &scratch->pattern, &scratch->matches);
  // The stretches of text in order, matches and what lies between them. A stretch is written out
  // when the one behind it is known not to join it.
  size_t held_begin = 0;
  bool held_matches = false;
  bool any_held = false;
  const auto flush = [&](size_t end) {
    if (any_held && end > held_begin) words->push_back(text.substr(held_begin, end - held_begin));
  };
  const auto visit = [&](size_t begin, bool matches) {
    if (any_held) {
      switch (step.behavior) {
        case Behavior::kContiguous:
          if (matches == held_matches) return;
          break;
        case Behavior::kMergedWithPrevious:
          // The first of a row of matches joins what precedes it; the others stand alone.
          if (matches && !held_matches) {
            held_matches = true;
            return;
          }
          break;
        case Behavior::kMergedWithNext:
          // The last of a row of matches joins what follows it.
          if (!matches && held_matches) {
            held_matches = false;
            return;
          }
          break;
        case Behavior::kRemoved:
        case Behavior::kIsolated:
          break;
      }
      if (!(step.behavior == Behavior::kRemoved && held_matches)) flush(begin);
    }
    held_begin = begin;
    held_matches = matches;
    any_held = true;
  };
  size_t pos = 0;
  for (const TextPattern::Match& match : scratch->matches) {
    if (match.begin > pos) visit(pos, step.invert);
    visit(match.begin, !step.invert);
    pos = match.end;
  }
  if (pos < text.size()) visit(pos, step.invert);
  if (!(step.behavior == Behavior::kRemoved && held_matches)) flush(text.size());
}

}  // namespace writescope::tokenizer
