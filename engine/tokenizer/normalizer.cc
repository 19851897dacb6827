#include "engine/tokenizer/normalizer.h"

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/json_fields.h"
#include "engine/tokenizer/nfc.h"
#include "engine/tokenizer/strings.h"
#include "engine/tokenizer/text_pattern.h"

namespace writescope::tokenizer {
namespace {

constexpr int kMaxDepth = 16;  // Sequences within sequences.

class NfcStep : public Normalizer {
 public:
  std::string Apply(std::string_view text, const StretchContext&) const override {
    return NormalizeNfc(text);
  }
};

class PrependStep : public Normalizer {
 public:
  explicit PrependStep(std::string prefix) : prefix_(std::move(prefix)) {}
  std::string Apply(std::string_view text, const StretchContext& context) const override {
    if (text.empty() || !context.at_piece_start) return std::string(text);
    return Cat(prefix_, text);
  }

 private:
  const std::string prefix_;
};

class ReplaceStep : public Normalizer {
 public:
  ReplaceStep(TextPattern pattern, std::string content)
      : pattern_(std::move(pattern)), content_(std::move(content)) {}
  std::string Apply(std::string_view text, const StretchContext&) const override {
    TextPattern::Scratch scratch;
    std::vector<TextPattern::Match> matches;
    pattern_.FindAll(text, &scratch, &matches);
    std::string result;
    size_t pos = 0;
    for (const TextPattern::Match& match : matches) {
      result.append(text.substr(pos, match.begin - pos)).append(content_);
      pos = match.end;
    }
    result.append(text.substr(pos));
    return result;
  }

 private:
  const TextPattern pattern_;
  const std::string content_;
};

class SequenceStep : public Normalizer {
 public:
  explicit SequenceStep(std::vector<std::unique_ptr<const Normalizer>> steps)
      : steps_(std::move(steps)) {}
  std::string Apply(std::string_view text, const StretchContext& context) const override {
    std::string result(text);
    for (const auto& step : steps_) result = step->Apply(result, context);
    return result;
  }

 private:
  const std::vector<std::unique_ptr<const Normalizer>> steps_;
};

using StepPtr = std::unique_ptr<const Normalizer>;

absl::StatusOr<StepPtr> MakeStep(const Json& spec, std::string_view where, int depth) {
  if (depth > kMaxDepth) {
    return absl::InvalidArgumentError(Cat(where, ": nested deeper than ", kMaxDepth));
  }
  ASSIGN_OR_RETURN(const std::string type, RequireString(spec, "type", where));
  if (type == "NFC") return std::make_unique<NfcStep>();
  if (type == "Prepend") {
    ASSIGN_OR_RETURN(std::string prefix, RequireString(spec, "prepend", where));
    return std::make_unique<PrependStep>(std::move(prefix));
  }
  if (type == "Replace") {
    ASSIGN_OR_RETURN(TextPattern pattern, TextPattern::FromJson(spec, where));
    ASSIGN_OR_RETURN(std::string content, RequireString(spec, "content", where));
    return std::make_unique<ReplaceStep>(std::move(pattern), std::move(content));
  }
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(const Json* specs, RequireArray(spec, "normalizers", where));
    std::vector<StepPtr> steps;
    for (size_t i = 0; i < specs->size(); ++i) {
      const std::string inner = Cat(where, ".normalizers[", i, "]");
      ASSIGN_OR_RETURN(StepPtr step, MakeStep((*specs)[i], inner, depth + 1));
      steps.push_back(std::move(step));
    }
    return std::make_unique<SequenceStep>(std::move(steps));
  }
  return absl::UnimplementedError(Cat(where, ": the kind \"", type, "\" is not supported"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<const Normalizer>> MakeNormalizer(const nlohmann::json& spec) {
  if (spec.is_null()) {
    return std::make_unique<const SequenceStep>(std::vector<StepPtr>());
  }
  return MakeStep(spec, "normalizer", 0);
}

}  // namespace writescope::tokenizer
