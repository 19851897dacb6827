#include "engine/runtime/active_request.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/runtime/error_reason.h"

namespace writescope::runtime {
namespace {

// What admission expects of a request that names no limit: enough that short answers never have to
// wait for blocks, little enough that many requests get in.
constexpr int64_t kExpectedNewTokens = 256;
// Prompt log-probabilities in one message; a long prompt's would not fit.
constexpr size_t kPromptLogprobsPerEvent = 256;

}  // namespace

absl::Status SlowReaderStatus() {
  return WithReason(
      absl::ResourceExhaustedError("the client reads its answer too slowly; the request was ended"),
      "SLOW_CONSUMER");
}

ActiveRequest::ActiveRequest(RequestId id, GenerateRequest request, std::vector<TokenId> prompt,
                             uint64_t seed, const ModelInfo& model,
                             const tokenizer::Tokenizer* tokenizer,
                             std::shared_ptr<GenerateSink> sink,
                             std::shared_ptr<RequestControl> control, absl::Time now)
    : id_(id),
      request_(std::move(request)),
      model_(model),
      tokenizer_(tokenizer),
      sink_(std::move(sink)),
      control_(std::move(control)),
      tokens_(std::move(prompt)),
      prompt_tokens_(static_cast<int64_t>(tokens_.size())),
      sampler_(request_.sampling, seed, tokens_),
      submitted_at_(now),
      last_progress_at_(now) {
  usage_.prompt_tokens = prompt_tokens_;
  max_new_tokens_ = model.max_context_tokens - prompt_tokens_;
  limit_reason_ = FinishReason::kContextFull;
  if (request_.stopping.max_tokens.has_value() &&
      *request_.stopping.max_tokens <= max_new_tokens_) {
    max_new_tokens_ = *request_.stopping.max_tokens;
    limit_reason_ = FinishReason::kMaxTokens;
  }
  if (tokenizer_ != nullptr) {
    detokenizer_.emplace(*tokenizer_, !request_.keep_special_tokens, /*at_text_start=*/false);
    absl::StatusOr<tokenizer::StopMatcher> stops =
        tokenizer::StopMatcher::Create(request_.stopping.stop);
    CHECK(stops.ok()) << stops.status().ToString();
    stops_ = *std::move(stops);
  }
}

int64_t ActiveRequest::expected_tokens() const {
  const int64_t new_tokens = request_.stopping.max_tokens.has_value()
                                 ? max_new_tokens_
                                 : std::min(max_new_tokens_, kExpectedNewTokens);
  return std::max(num_tokens(), prompt_tokens_ + new_tokens);
}

LogitsOf ActiveRequest::wanted_logits(bool reaches_end) const {
  if (owes_prompt_logprobs()) return LogitsOf::kAll;
  return reaches_end && max_new_tokens_ > 0 ? LogitsOf::kLast : LogitsOf::kNone;
}

bool ActiveRequest::wants_only_largest() const {
  return sampler_.takes_largest() && !bans_tokens() && !request_.logprobs.has_value() &&
         !owes_prompt_logprobs();
}

void ActiveRequest::AddPromptLogprobs(int64_t position, std::span<const float> logits) {
  if (!request_.prompt_logprobs.has_value()) return;
  if (position == 0 && prompt_logprobs_done_ == 0) {
    prompt_logprobs_.push_back({});
    prompt_logprobs_done_ = 1;
  }
  // The logits after `position` speak of the token behind it.
  if (position + 1 == prompt_logprobs_done_ && position + 1 < prompt_tokens_) {
    prompt_logprobs_.push_back(
        LogprobsOf(logits, tokens_[static_cast<size_t>(position + 1)], *request_.prompt_logprobs));
    ++prompt_logprobs_done_;
  }
  if (prompt_logprobs_.size() >= kPromptLogprobsPerEvent ||
      (prompt_logprobs_done_ == prompt_tokens_ && !prompt_logprobs_.empty())) {
    GenerateEvent event;
    event.prompt_logprobs = std::exchange(prompt_logprobs_, {});
    Send(std::move(event));
  }
}

std::vector<TokenId> ActiveRequest::BannedTokens() const {
  if (!bans_tokens()) return {};
  std::vector<TokenId> banned = request_.stopping.stop_token_ids;
  if (!request_.stopping.ignore_eos) {
    banned.insert(banned.end(), model_.eos_tokens.begin(), model_.eos_tokens.end());
  }
  return banned;
}

std::string ActiveRequest::TextOf(TokenId token) {
  if (!detokenizer_.has_value()) return "";
  std::string delta = detokenizer_->Push(token);
  // Below min_tokens text passes by the matcher, so that no stop can end it.
  if (usage_.generated_tokens <= request_.stopping.min_tokens && request_.stopping.min_tokens > 0) {
    return delta;
  }
  return stops_->Push(delta);
}

std::string ActiveRequest::HeldBackText() {
  if (!detokenizer_.has_value() || text_ended_) return "";
  text_ended_ = true;
  // It is text after all, unless a stop string has matched.
  std::string text = stops_->Push(detokenizer_->Finish());
  text += stops_->Finish();
  return text;
}

std::optional<Finish> ActiveRequest::EndOf(TokenId token) const {
  const auto holds = [&](const std::vector<TokenId>& ids) {
    return std::find(ids.begin(), ids.end(), token) != ids.end();
  };
  // The caller's own stop ids say more than the model's.
  if (holds(request_.stopping.stop_token_ids)) {
    return Finish{.reason = FinishReason::kStopToken, .matched_token = token};
  }
  if (!request_.stopping.ignore_eos && holds(model_.eos_tokens)) {
    return Finish{.reason = FinishReason::kEosToken, .matched_token = token};
  }
  if (stops_.has_value() && stops_->matched_stop().has_value()) {
    return Finish{
        .reason = FinishReason::kStopString,
        .matched_stop = request_.stopping.stop[static_cast<size_t>(*stops_->matched_stop())]};
  }
  if (usage_.generated_tokens >= max_new_tokens_) return Finish{.reason = limit_reason_};
  return std::nullopt;
}

absl::Status ActiveRequest::OnLogits(int64_t position, const RowLogits& logits, absl::Time now) {
  const bool only_largest = logits.all.empty();
  if (!only_largest) AddPromptLogprobs(position, logits.all);
  if (position + 1 < num_tokens()) return absl::OkStatus();
  if (max_new_tokens_ == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(SampledToken sampled,
                   only_largest ? Sampler::SampleLargest(logits.largest, usage_.generated_tokens)
                                : sampler_.Sample(logits.all, usage_.generated_tokens,
                                                  BannedTokens(), request_.logprobs));
  sampler_.Accept(sampled.token);
  tokens_.push_back(sampled.token);
  ++usage_.generated_tokens;
  if (first_token_at_ == absl::InfinitePast()) {
    first_token_at_ = now;
  } else {
    inter_token_s_ = absl::ToDoubleSeconds(now - last_token_at_);
  }
  last_token_at_ = now;
  GenerateEvent event;
  event.tokens.push_back(sampled.token);
  if (sampled.logprobs.has_value()) event.logprobs.push_back(*std::move(sampled.logprobs));
  event.text = TextOf(sampled.token);
  finish_ = EndOf(sampled.token);
  if (finish_.has_value()) event.text += HeldBackText();
  Send(std::move(event));
  return absl::OkStatus();
}

void ActiveRequest::Send(GenerateEvent event) {
  event.usage = usage_;
  if (!slow_reader_ && !sink_->OnEvent(std::move(event))) slow_reader_ = true;
}

void ActiveRequest::AddAttention(const SliceAttention& slice, int64_t kv_bytes_per_token) {
  placement_.gpu_resident_tokens += slice.resident_tokens;
  placement_.gpu_streamed_tokens += slice.streamed_tokens;
  placement_.cpu_tokens += slice.cpu_tokens;
  placement_.streamed_bytes += slice.streamed_tokens * kv_bytes_per_token;
  ++placement_.steps;
  const int64_t spilled = slice.streamed_tokens + slice.cpu_tokens;
  spilled_tokens_ += spilled;
  placement_.last_cpu_share =
      spilled == 0 ? 0 : static_cast<double>(slice.cpu_tokens) / static_cast<double>(spilled);
}

PlacementReport ActiveRequest::placement() const {
  PlacementReport report = placement_;
  report.mean_cpu_share = spilled_tokens_ == 0 ? 0
                                               : static_cast<double>(report.cpu_tokens) /
                                                     static_cast<double>(spilled_tokens_);
  return report;
}

void ActiveRequest::ReportProgress(int64_t tokens_done, int64_t queue_position,
                                   absl::Duration interval, absl::Time now) {
  // Once there is text, the text is the progress.
  if (usage_.generated_tokens > 0 || now - last_progress_at_ < interval) return;
  last_progress_at_ = now;
  PromptProgress progress{.tokens_done = std::min(tokens_done, prompt_tokens_),
                          .tokens_total = prompt_tokens_,
                          .tokens_cached = usage_.cached_prompt_tokens,
                          .queue_position = queue_position};
  // At the pace of this reading: one that was dropped has been read before.
  const int64_t read = progress.tokens_done - reading_from;
  if (read > 0 && reading_since != absl::InfinitePast()) {
    progress.estimated_time_left = (now - reading_since) / static_cast<double>(read) *
                                   static_cast<double>(prompt_tokens_ - progress.tokens_done);
  }
  GenerateEvent event;
  event.progress = progress;
  Send(std::move(event));
}

absl::Status ActiveRequest::Complete(const absl::Status& status, const PlacementReport& placement) {
  if (status.ok()) {
    GenerateEvent event;
    event.text = HeldBackText();
    event.finish = finish_;
    event.placement = placement;
    Send(std::move(event));
  }
  absl::Status told = status.ok() && slow_reader_ ? SlowReaderStatus() : status;
  sink_->OnDone(told);
  return told;
}

std::optional<double> ActiveRequest::TakeInterTokenSeconds() {
  return std::exchange(inter_token_s_, std::nullopt);
}

RequestTimes ActiveRequest::Times(const absl::Status& status, absl::Time now) const {
  RequestTimes times;
  times.request_id = request_.request_id;
  times.status = status;
  if (status.ok() && finish_.has_value()) times.reason = finish_->reason;
  times.usage = usage_;
  const bool started = prefill_started_at != absl::InfinitePast();
  times.queue_seconds = absl::ToDoubleSeconds((started ? prefill_started_at : now) - submitted_at_);
  if (first_token_at_ != absl::InfinitePast()) {
    times.first_token_seconds = absl::ToDoubleSeconds(first_token_at_ - submitted_at_);
    times.prefill_seconds = absl::ToDoubleSeconds(first_token_at_ - prefill_started_at);
    times.decode_seconds = absl::ToDoubleSeconds(last_token_at_ - first_token_at_);
  } else if (started) {
    times.prefill_seconds = absl::ToDoubleSeconds(now - prefill_started_at);
  }
  times.total_seconds = absl::ToDoubleSeconds(now - submitted_at_);
  if (const int64_t asked_ns = control_->end_asked_ns.load(); asked_ns != 0) {
    times.cancel_seconds = absl::ToDoubleSeconds(now - absl::FromUnixNanos(asked_ns));
  }
  return times;
}

}  // namespace writescope::runtime
