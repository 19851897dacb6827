#include "engine/runtime/request_validation.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "engine/runtime/error_reason.h"

namespace writescope::runtime {
namespace {

template <typename T>
absl::Status Bad(std::string_view name, const T& value, std::string_view rule) {
  return WithReason(absl::InvalidArgumentError(absl::StrCat(std::string(name), " is ", value,
                                                            "; it has to be ", std::string(rule))),
                    "INVALID_PARAMETER");
}

absl::Status CheckSampling(const SamplingParams& s, const ModelInfo& model) {
  // Written so that a NaN fails every comparison.
  if (!(s.temperature >= 0 && s.temperature <= 1e4)) {
    return Bad("temperature", s.temperature, "in [0, 10000]");
  }
  if (s.top_k < 0 || s.top_k > model.vocab_size) {
    return Bad("top_k", s.top_k, absl::StrCat("in [0, ", model.vocab_size, "]"));
  }
  if (!(s.top_p > 0 && s.top_p <= 1)) return Bad("top_p", s.top_p, "in (0, 1]");
  if (!(s.min_p >= 0 && s.min_p < 1)) return Bad("min_p", s.min_p, "in [0, 1)");
  if (!(s.repetition_penalty > 0 && s.repetition_penalty <= 100)) {
    return Bad("repetition_penalty", s.repetition_penalty, "in (0, 100]");
  }
  if (!(std::fabs(s.presence_penalty) <= 2)) {
    return Bad("presence_penalty", s.presence_penalty, "in [-2, 2]");
  }
  if (!(std::fabs(s.frequency_penalty) <= 2)) {
    return Bad("frequency_penalty", s.frequency_penalty, "in [-2, 2]");
  }
  return absl::OkStatus();
}

absl::Status CheckStopping(const StoppingParams& s, const ModelInfo& model) {
  if (s.max_tokens.has_value() && *s.max_tokens < 0) {
    return Bad("max_tokens", *s.max_tokens, "at least 0");
  }
  if (s.min_tokens < 0) return Bad("min_tokens", s.min_tokens, "at least 0");
  if (s.max_tokens.has_value() && s.min_tokens > *s.max_tokens) {
    return Bad("min_tokens", s.min_tokens, absl::StrCat("at most max_tokens, ", *s.max_tokens));
  }
  if (s.stop.size() > kMaxStopStrings) {
    return Bad("the number of stop strings", s.stop.size(),
               absl::StrCat("at most ", kMaxStopStrings));
  }
  for (const std::string& stop : s.stop) {
    if (stop.empty() || stop.size() > kMaxStopStringBytes) {
      return Bad("the length of a stop string", stop.size(),
                 absl::StrCat("in [1, ", kMaxStopStringBytes, "] bytes"));
    }
  }
  if (!s.stop.empty() && !model.has_tokenizer) {
    return WithReason(
        absl::InvalidArgumentError("stop strings need a tokenizer, and this checkpoint has none"),
        "NO_TOKENIZER");
  }
  if (s.stop_token_ids.size() > kMaxStopTokenIds) {
    return Bad("the number of stop token ids", s.stop_token_ids.size(),
               absl::StrCat("at most ", kMaxStopTokenIds));
  }
  for (const TokenId id : s.stop_token_ids) {
    if (id < 0 || id >= model.vocab_size) {
      return Bad("a stop token id", id, absl::StrCat("in [0, ", model.vocab_size, ")"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateRequest(const GenerateRequest& request, const ModelInfo& model) {
  RETURN_IF_ERROR(CheckSampling(request.sampling, model));
  RETURN_IF_ERROR(CheckStopping(request.stopping, model));
  for (const auto& [name, value] : {std::pair{"logprobs", request.logprobs},
                                    std::pair{"prompt_logprobs", request.prompt_logprobs}}) {
    if (value.has_value() && (*value < 0 || *value > kMaxLogprobs)) {
      return Bad(name, *value, absl::StrCat("in [0, ", kMaxLogprobs, "]"));
    }
  }
  if (!model.has_tokenizer && !std::holds_alternative<std::vector<TokenId>>(request.prompt)) {
    return WithReason(absl::InvalidArgumentError(
                          "this checkpoint has no tokenizer: send the prompt as token ids"),
                      "NO_TOKENIZER");
  }
  return absl::OkStatus();
}

absl::Status ValidatePrompt(const std::vector<TokenId>& tokens, const GenerateRequest& request,
                            const ModelInfo& model) {
  if (tokens.empty()) {
    return WithReason(absl::InvalidArgumentError("the prompt has no tokens"), "EMPTY_PROMPT");
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= model.vocab_size) {
      return WithReason(absl::InvalidArgumentError(
                            absl::StrCat("token id ", tokens[i], " at position ", i,
                                         " is not in the vocabulary of ", model.vocab_size)),
                        "INVALID_TOKEN_ID");
    }
  }
  const int64_t prompt_tokens = static_cast<int64_t>(tokens.size());
  const int64_t needed = prompt_tokens + std::max<int64_t>(request.stopping.min_tokens, 0);
  if (needed > model.max_context_tokens) {
    return WithReason(
        absl::InvalidArgumentError(absl::StrCat(
            "the prompt has ", prompt_tokens, " tokens and asks for at least ",
            request.stopping.min_tokens, " more; the context is ", model.max_context_tokens)),
        "CONTEXT_LENGTH_EXCEEDED");
  }
  return absl::OkStatus();
}

}  // namespace writescope::runtime
