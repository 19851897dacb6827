// What a caller asks of the engine, and what comes back.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/base/units.h"

namespace writescope::runtime {

struct PromptSegment {
  std::string text;
  bool allow_special = false;
};
// Token ids, or text in segments.
using Prompt = std::variant<std::vector<TokenId>, std::vector<PromptSegment>>;

// Defaults are those of the API; the ranges are checked by ValidateRequest.
struct SamplingParams {
  double temperature = 1;  // 0 is greedy.
  int top_k = 0;           // 0 is all.
  double top_p = 1;
  double min_p = 0;
  std::optional<uint64_t> seed;
  double repetition_penalty = 1;
  double presence_penalty = 0;
  double frequency_penalty = 0;
};

struct StoppingParams {
  std::optional<int64_t> max_tokens;
  int64_t min_tokens = 0;
  std::vector<std::string> stop;
  std::vector<TokenId> stop_token_ids;
  bool ignore_eos = false;
};

struct GenerateRequest {
  std::string request_id;  // Unique among those in flight; empty lets the engine choose.
  Prompt prompt;
  std::optional<bool> add_bos;
  SamplingParams sampling;
  StoppingParams stopping;
  std::optional<int> logprobs;         // Alternatives beside each output token.
  std::optional<int> prompt_logprobs;  // The same for prompt tokens.
  bool keep_special_tokens = false;
  absl::Time deadline = absl::InfiniteFuture();  // The client's; past it the request is cancelled.
};

struct TokenLogprob {
  TokenId token = 0;
  float logprob = 0;
  int rank = 0;
};
struct PositionLogprobs {
  std::optional<TokenLogprob> token;  // Nothing for the first prompt token.
  std::vector<TokenLogprob> top;
};

enum class FinishReason {
  kMaxTokens,
  kContextFull,
  kEosToken,
  kStopToken,
  kStopString,
  kAborted,
  kTimeLimit
};

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t cached_prompt_tokens = 0;
  int64_t generated_tokens = 0;
};

// Which processor attended to what, over a request's decode steps. Tokens are means over layers.
struct PlacementReport {
  int64_t gpu_resident_tokens = 0;
  int64_t gpu_streamed_tokens = 0;
  int64_t cpu_tokens = 0;
  int64_t streamed_bytes = 0;
  double last_cpu_share = 0;
  double mean_cpu_share = 0;
  int64_t device_bytes = 0;
  int64_t stream_bytes = 0;
  int64_t swing_bytes = 0;
  int64_t host_bytes = 0;
  int64_t steps = 0;
};

struct PromptProgress {
  int64_t tokens_done = 0;
  int64_t tokens_total = 0;
  int64_t tokens_cached = 0;
  std::optional<absl::Duration> estimated_time_left;
  int64_t queue_position = 0;
};

struct Finish {
  FinishReason reason = FinishReason::kMaxTokens;
  std::optional<TokenId> matched_token;
  std::string matched_stop;
};

// One piece of a request's answer; every field but usage may be empty.
struct GenerateEvent {
  std::string text;  // Whole UTF-8
  std::vector<TokenId> tokens;
  std::vector<PositionLogprobs> logprobs;
  std::vector<PositionLogprobs> prompt_logprobs;
  std::optional<PromptProgress> progress;
  Usage usage;
  std::optional<Finish> finish;              // In the last event of a request that ended well
  std::optional<PlacementReport> placement;  // Likewise
};

// Receives a request's answer, in order. Called by the engine thread, which must not be held up: an
// implementation hands over and returns.
class GenerateSink {
 public:
  virtual ~GenerateSink() = default;
  // False: the reader is too slow; the engine ends the request with RESOURCE_EXHAUSTED.
  virtual bool OnEvent(GenerateEvent event) = 0;
  // The last call. OK after an event with `finish`; otherwise why the request failed.
  virtual void OnDone(const absl::Status& status) = 0;
};

}  // namespace writescope::runtime
