// A request from its admission to its last event: its tokens, its text, and when it ends.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/base/units.h"
#include "engine/runtime/engine.h"
#include "engine/runtime/model_runner.h"
#include "engine/runtime/request.h"
#include "engine/runtime/sampler.h"
#include "engine/tokenizer/detokenizer.h"
#include "engine/tokenizer/stop_matcher.h"
#include "engine/tokenizer/tokenizer.h"

namespace writescope::runtime {

// What other threads may ask of a request. Shared: the caller's map and the engine thread both need
// it, and either may be the last.
struct RequestControl {
  std::atomic<bool> cancelled{false};
  std::atomic<bool> aborted{false};
  // When the request was told to end, and when to be cancelled, each for the first time; UnixEpoch
  // before. In nanoseconds, so that they are atomic.
  std::atomic<int64_t> end_asked_ns{0};
  std::atomic<int64_t> cancelled_ns{0};

  void Cancel(absl::Time now) {
    NoteFirst(cancelled_ns, now);
    AskEnd(cancelled, now);
  }
  void Abort(absl::Time now) { AskEnd(aborted, now); }
  bool CancelledSince(absl::Time time) const {
    return cancelled_ns.load() >= absl::ToUnixNanos(time);
  }

 private:
  static void NoteFirst(std::atomic<int64_t>& first_ns, absl::Time now) {
    int64_t none = 0;
    first_ns.compare_exchange_strong(none, absl::ToUnixNanos(now));
  }
  void AskEnd(std::atomic<bool>& flag, absl::Time now) {
    NoteFirst(end_asked_ns, now);
    flag.store(true, std::memory_order_release);
  }
};

// Of a request whose sink refused a part of the answer.
absl::Status SlowReaderStatus();

// Engine thread, but for the constructor.
class ActiveRequest {
 public:
  // `tokenizer` is null for a checkpoint without one. The request has been validated.
  ActiveRequest(RequestId id, GenerateRequest request, std::vector<TokenId> prompt, uint64_t seed,
                const ModelInfo& model, const tokenizer::Tokenizer* tokenizer,
                std::shared_ptr<GenerateSink> sink, std::shared_ptr<RequestControl> control,
                absl::Time now);

  RequestId id() const { return id_; }
  const std::string& request_id() const { return request_.request_id; }
  const GenerateRequest& request() const { return request_; }
  RequestControl& control() { return *control_; }
  const std::vector<TokenId>& tokens() const { return tokens_; }
  int64_t num_tokens() const { return static_cast<int64_t>(tokens_.size()); }
  int64_t prompt_tokens() const { return prompt_tokens_; }
  Usage& usage() { return usage_; }
  absl::Time submitted_at() const { return submitted_at_; }
  // Tokens that it may still come to hold, as far as is known: for admission.
  int64_t expected_tokens() const;
  LogitsOf wanted_logits(bool reaches_end) const;
  // Whether the largest of its logits is all that the next OnLogits needs.
  bool wants_only_largest() const;

  // Logits after position `position` of its tokens. Samples when it is the last; the first error
  // ends the request.
  absl::Status OnLogits(int64_t position, const RowLogits& logits, absl::Time now);
  // All its tokens are in the cache and there is no token to come: max_tokens is 0, or the prompt
  // fills the context.
  void FinishWithoutTokens() { finish_ = Finish{.reason = limit_reason_}; }
  const std::optional<Finish>& finish() const { return finish_; }
  void SetFinish(Finish finish) { finish_ = std::move(finish); }

  void AddAttention(const SliceAttention& slice, int64_t kv_bytes_per_token);
  // Sends a progress message when one is due.
  void ReportProgress(int64_t tokens_done, int64_t queue_position, absl::Duration interval,
                      absl::Time now);
  // The last two calls of the sink. Returns what it was told: an answer of which the sink refused
  // a part, be it the last one, is not OK.
  absl::Status Complete(const absl::Status& status, const PlacementReport& placement);
  RequestTimes Times(const absl::Status& status, absl::Time now) const;
  bool slow_reader() const { return slow_reader_; }
  PlacementReport placement() const;
  // Seconds since the last token at `now`; nothing for the first.
  std::optional<double> TakeInterTokenSeconds();

  // State that the step loop keeps with a request.
  int slot = -1;  // In the cache; -1 while waiting
  bool paused = false;
  bool matched_prefix = false;
  bool read_before = false;  // And dropped since
  absl::Time prefill_started_at = absl::InfinitePast();
  // The same of the present reading of a prompt that was dropped meanwhile, and what it found
  // cached.
  absl::Time reading_since = absl::InfinitePast();
  int64_t reading_from = 0;
  // In the engine's totals already.
  int64_t counted_prompt_tokens = 0;
  int64_t counted_generated_tokens = 0;

 private:
  void Send(GenerateEvent event);
  bool owes_prompt_logprobs() const {
    return request_.prompt_logprobs.has_value() && prompt_logprobs_done_ < prompt_tokens_;
  }
  void AddPromptLogprobs(int64_t position, std::span<const float> logits);
  bool bans_tokens() const { return usage_.generated_tokens < request_.stopping.min_tokens; }
  std::vector<TokenId> BannedTokens() const;
  std::string TextOf(TokenId token);
  std::string HeldBackText();
  std::optional<Finish> EndOf(TokenId token) const;

  const RequestId id_;
  const GenerateRequest request_;
  const ModelInfo& model_;
  const tokenizer::Tokenizer* tokenizer_;
  std::shared_ptr<GenerateSink> sink_;
  std::shared_ptr<RequestControl> control_;
  std::vector<TokenId> tokens_;  // Prompt and output
  const int64_t prompt_tokens_;
  int64_t max_new_tokens_;
  FinishReason limit_reason_ = FinishReason::kMaxTokens;
  Sampler sampler_;
  std::optional<tokenizer::IncrementalDetokenizer> detokenizer_;
  std::optional<tokenizer::StopMatcher> stops_;
  std::vector<PositionLogprobs> prompt_logprobs_;  // Not sent yet
  int64_t prompt_logprobs_done_ = 0;  // Positions, so that a recomputed prompt sends none twice
  Usage usage_;
  std::optional<Finish> finish_;
  PlacementReport placement_;
  int64_t spilled_tokens_ = 0;
  bool slow_reader_ = false;
  bool text_ended_ = false;

  const absl::Time submitted_at_;
  absl::Time first_token_at_ = absl::InfinitePast();
  absl::Time last_token_at_ = absl::InfinitePast();
  absl::Time last_progress_at_;
  std::optional<double> inter_token_s_;
};

}  // namespace writescope::runtime
