#include "engine/runtime/request_validation.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/base/number_text.h"
#include "engine/base/status_macros.h"
#include "engine/runtime/error_reason.h"

namespace writescope::runtime {
namespace {

// `field` is a path in the API's request, `limit` the bound that was passed, `unit` what follows
// the value in the message.
template <typename T>
absl::Status Bad(std::string_view field, const T& number, std::string_view rule, int64_t limit,
                 std::string_view unit = "") {
  std::string value;
  if constexpr (std::is_floating_point_v<T>) {
    value = NumberText(number);
  } else {
    value = absl::StrCat(number);
  }
  absl::Status status = WithReason(
      absl::InvalidArgumentError(absl::StrCat(std::string(field), " is ", value, std::string(unit),
                                              "; it has to be ", std::string(rule))),
      "INVALID_PARAMETER");
  status = WithMetadata(std::move(status), "field", field);
  status = WithMetadata(std::move(status), "value", value);
  return WithMetadata(std::move(status), "limit", limit);
}

absl::Status NoTokenizer(std::string_view message) {
  return WithReason(absl::InvalidArgumentError(std::string(message)), "NO_TOKENIZER");
}

absl::Status CheckSampling(const SamplingParams& s, const ModelInfo& model) {
  // Written so that a NaN fails every comparison.
  if (!(s.temperature >= 0 && s.temperature <= 1e4)) {
    return Bad("sampling.temperature", s.temperature, "in [0, 10000]",
               s.temperature < 0 ? 0 : 10000);
  }
  if (s.top_k < 0 || s.top_k > model.vocab_size) {
    return Bad("sampling.top_k", s.top_k, absl::StrCat("in [0, ", model.vocab_size, "]"),
               s.top_k < 0 ? 0 : model.vocab_size);
  }
  if (!(s.top_p > 0 && s.top_p <= 1)) {
    return Bad("sampling.top_p", s.top_p, "in (0, 1]", s.top_p <= 0 ? 0 : 1);
  }
  if (!(s.min_p >= 0 && s.min_p < 1)) {
    return Bad("sampling.min_p", s.min_p, "in [0, 1)", s.min_p < 0 ? 0 : 1);
  }
  if (!(s.repetition_penalty > 0 && s.repetition_penalty <= 100)) {
    return Bad("sampling.repetition_penalty", s.repetition_penalty, "in (0, 100]",
               s.repetition_penalty <= 0 ? 0 : 100);
  }
  if (!(std::fabs(s.presence_penalty) <= 2)) {
    return Bad("sampling.presence_penalty", s.presence_penalty, "in [-2, 2]",
               s.presence_penalty < 0 ? -2 : 2);
  }
  if (!(std::fabs(s.frequency_penalty) <= 2)) {
    return Bad("sampling.frequency_penalty", s.frequency_penalty, "in [-2, 2]",
               s.frequency_penalty < 0 ? -2 : 2);
  }
  return absl::OkStatus();
}

// Below min_tokens no token that ends the text is taken, and in a small vocabulary all may be such.
absl::Status CheckTokensAreLeft(const StoppingParams& s, const ModelInfo& model) {
  if (s.min_tokens == 0) return absl::OkStatus();
  std::vector<TokenId> ending = s.stop_token_ids;
  if (!s.ignore_eos) ending.insert(ending.end(), model.eos_tokens.begin(), model.eos_tokens.end());
  std::sort(ending.begin(), ending.end());
  ending.erase(std::unique(ending.begin(), ending.end()), ending.end());
  if (static_cast<int>(ending.size()) < model.vocab_size) return absl::OkStatus();
  return Bad("stopping.min_tokens", s.min_tokens, "0 where every token ends the text", 0);
}

absl::Status CheckStopping(const StoppingParams& s, const ModelInfo& model) {
  if (s.max_tokens.has_value() && *s.max_tokens < 0) {
    return Bad("stopping.max_tokens", *s.max_tokens, "at least 0", 0);
  }
  if (s.min_tokens < 0) return Bad("stopping.min_tokens", s.min_tokens, "at least 0", 0);
  if (s.max_tokens.has_value() && s.min_tokens > *s.max_tokens) {
    return Bad("stopping.min_tokens", s.min_tokens,
               absl::StrCat("at most max_tokens, ", *s.max_tokens), *s.max_tokens);
  }
  if (s.stop.size() > kMaxStopStrings) {
    return Bad("stopping.stop", s.stop.size(), absl::StrCat("at most ", kMaxStopStrings),
               kMaxStopStrings, " strings long");
  }
  for (size_t i = 0; i < s.stop.size(); ++i) {
    const size_t bytes = s.stop[i].size();
    if (bytes > 0 && bytes <= kMaxStopStringBytes) continue;
    return Bad(absl::StrCat("stopping.stop[", i, "]"), bytes,
               absl::StrCat("in [1, ", kMaxStopStringBytes, "]"),
               bytes == 0 ? 1 : kMaxStopStringBytes, " bytes long");
  }
  if (!s.stop.empty() && !model.has_tokenizer) {
    return NoTokenizer("stop strings need a tokenizer, and this checkpoint has none");
  }
  if (s.stop_token_ids.size() > kMaxStopTokenIds) {
    return Bad("stopping.stop_token_ids", s.stop_token_ids.size(),
               absl::StrCat("at most ", kMaxStopTokenIds), kMaxStopTokenIds, " ids long");
  }
  for (size_t i = 0; i < s.stop_token_ids.size(); ++i) {
    const TokenId id = s.stop_token_ids[i];
    if (id >= 0 && id < model.vocab_size) continue;
    return Bad(absl::StrCat("stopping.stop_token_ids[", i, "]"), id,
               absl::StrCat("in [0, ", model.vocab_size, ")"), id < 0 ? 0 : model.vocab_size);
  }
  return CheckTokensAreLeft(s, model);
}

}  // namespace

absl::Status ValidateRequest(const GenerateRequest& request, const ModelInfo& model) {
  RETURN_IF_ERROR(CheckSampling(request.sampling, model));
  RETURN_IF_ERROR(CheckStopping(request.stopping, model));
  for (const auto& [field, value] :
       {std::pair{"logprobs.logprobs", request.logprobs},
        std::pair{"logprobs.prompt_logprobs", request.prompt_logprobs}}) {
    if (value.has_value() && (*value < 0 || *value > kMaxLogprobs)) {
      return Bad(field, *value, absl::StrCat("in [0, ", kMaxLogprobs, "]"),
                 *value < 0 ? 0 : kMaxLogprobs);
    }
  }
  if (!model.has_tokenizer && !std::holds_alternative<std::vector<TokenId>>(request.prompt)) {
    return NoTokenizer("this checkpoint has no tokenizer: send the prompt as token ids");
  }
  return absl::OkStatus();
}

absl::Status ValidatePrompt(const std::vector<TokenId>& tokens, const GenerateRequest& request,
                            const ModelInfo& model) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= 0 && tokens[i] < model.vocab_size) continue;
    return InvalidTokenId(tokens[i], i, model.vocab_size, "token_ids.ids");
  }
  return ValidateLength(static_cast<int64_t>(tokens.size()), request, model);
}

absl::Status ValidateLength(int64_t prompt_tokens, const GenerateRequest& request,
                            const ModelInfo& model) {
  if (prompt_tokens == 0) {
    return WithMetadata(
        WithReason(absl::InvalidArgumentError("the prompt has no tokens"), "EMPTY_PROMPT"), "field",
        "prompt");
  }
  const int64_t min_tokens = std::max<int64_t>(request.stopping.min_tokens, 0);
  if (prompt_tokens + min_tokens <= model.max_context_tokens) return absl::OkStatus();
  absl::Status status =
      WithReason(absl::InvalidArgumentError(absl::StrCat(
                     "the prompt has ", prompt_tokens, " tokens and asks for at least ", min_tokens,
                     " more; the context is ", model.max_context_tokens)),
                 "CONTEXT_LENGTH_EXCEEDED");
  status = WithMetadata(std::move(status), "prompt_tokens", prompt_tokens);
  status = WithMetadata(std::move(status), "min_tokens", min_tokens);
  return WithMetadata(std::move(status), "max_context_tokens", model.max_context_tokens);
}

absl::Status InvalidTokenId(TokenId id, size_t position, int vocab_size, std::string_view field,
                            std::string_view bytes) {
  const std::string spelling =
      bytes.empty() ? "" : absl::StrCat(" (\"", absl::Utf8SafeCEscape(std::string(bytes)), "\")");
  absl::Status status = WithReason(
      absl::InvalidArgumentError(absl::StrCat("token id ", id, spelling, " at position ", position,
                                              " is not in the model's vocabulary of ", vocab_size)),
      "INVALID_TOKEN_ID");
  status = WithMetadata(std::move(status), "field", field);
  status = WithMetadata(std::move(status), "value", id);
  status = WithMetadata(std::move(status), "limit", id < 0 ? 0 : vocab_size);
  return WithMetadata(std::move(status), "position", position);
}

}  // namespace writescope::runtime
