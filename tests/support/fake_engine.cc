#include "tests/support/fake_engine.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/base/status_macros.h"
#include "engine/base/timed_wait.h"
#include "engine/runtime/error_reason.h"
#include "engine/runtime/request_validation.h"

namespace writescope::testing_support {
namespace {

using runtime::WithMetadata;
using runtime::WithReason;

constexpr int kVocabSize = 256;
constexpr int64_t kKvBytesPerToken = 1024;

int64_t PromptTokens(const runtime::Prompt& prompt) {
  if (const auto* ids = std::get_if<std::vector<TokenId>>(&prompt)) {
    return static_cast<int64_t>(ids->size());
  }
  int64_t bytes = 0;
  for (const auto& segment : std::get<std::vector<runtime::PromptSegment>>(prompt)) {
    bytes += static_cast<int64_t>(segment.text.size());
  }
  return bytes;
}

std::string Echo(const runtime::Prompt& prompt) {
  std::string text;
  const auto* segments = std::get_if<std::vector<runtime::PromptSegment>>(&prompt);
  if (segments == nullptr) return text;
  for (const auto& segment : *segments) {
    absl::StrAppend(&text, segment.allow_special ? "{" + segment.text + "}" : segment.text);
  }
  return text;
}

}  // namespace

FakeEngine::FakeEngine(const runtime::EngineOptions& options, FakeEngineOptions fake,
                       runtime::EngineObserver* observer)
    : fake_(std::move(fake)), observer_(observer), heartbeat_ns_(absl::GetCurrentTimeNanos()) {
  model_.name = "fake";
  model_.architecture = "FakeForCausalLM";
  model_.vocab_size = kVocabSize;
  model_.num_layers = 2;
  model_.kv_dtype = "bf16";
  model_.weight_dtype = "bf16";
  model_.kv_bytes_per_token = kKvBytesPerToken;
  model_.has_tokenizer = fake_.has_tokenizer;
  model_.eos_tokens = {0};
  model_.chat_template = fake_.chat_template;
  model_.device = "fake";
  model_.max_context_tokens = fake_.max_context_tokens;
  model_.max_resident_context_tokens = 4096;
  model_.max_sequences = fake_.max_sequences;
  model_.max_queue = fake_.max_queue;
  share_.min_cpu_share = options.min_cpu_share;
  share_.max_cpu_share = options.max_cpu_share;
  share_.table = roofline::ConstantTable(0.5);
  state_.cpu_workers = 1;
  state_.cut = options.cut;
  state_.link_simulated = fake_.link_simulated;
  state_.link_pace_bytes_per_s = options.link_bytes_per_s;
  for (const auto region : {runtime::RegionName::kDevice, runtime::RegionName::kStream,
                            runtime::RegionName::kSwing, runtime::RegionName::kHost}) {
    state_.regions.push_back({.region = region, .capacity_bytes = 64 * kMiB});
  }
  thread_ = std::thread([this] { Loop(); });
}

FakeEngine::~FakeEngine() { Stop(); }

void FakeEngine::Fail(const absl::Status& health) {
  std::lock_guard lock(mutex_);
  state_.health = health;
}

absl::Time FakeEngine::cancel_time(std::string_view request_id) const {
  std::lock_guard lock(mutex_);
  const auto found = cancels_.find(request_id);
  return found == cancels_.end() ? absl::InfinitePast() : found->second;
}

bool FakeEngine::in_flight(std::string_view request_id) const {
  std::lock_guard lock(mutex_);
  return std::any_of(requests_.begin(), requests_.end(), [&](const auto& running) {
    return running->request.request_id == request_id;
  });
}

std::optional<runtime::GenerateRequest> FakeEngine::last_request() const {
  std::lock_guard lock(mutex_);
  return last_request_;
}

absl::Status FakeEngine::Check(const runtime::GenerateRequest& request,
                               int64_t prompt_tokens) const {
  RETURN_IF_ERROR(runtime::ValidateRequest(request, model_));
  if (const auto* ids = std::get_if<std::vector<TokenId>>(&request.prompt)) {
    return runtime::ValidatePrompt(*ids, request, model_);
  }
  return runtime::ValidateLength(prompt_tokens, request, model_);
}

absl::StatusOr<RequestId> FakeEngine::Submit(runtime::GenerateRequest request,
                                             std::shared_ptr<runtime::GenerateSink> sink) {
  const int64_t prompt_tokens = PromptTokens(request.prompt);
  RETURN_IF_ERROR(Check(request, prompt_tokens));
  std::lock_guard lock(mutex_);
  if (draining_.load() || stopped_.load()) {
    return WithReason(absl::UnavailableError("draining"), "DRAINING");
  }
  for (const auto& running : requests_) {
    if (!request.request_id.empty() && running->request.request_id == request.request_id) {
      return WithReason(
          absl::AlreadyExistsError(absl::StrCat("request ", request.request_id, " is in flight")),
          "DUPLICATE_REQUEST_ID");
    }
  }
  if (static_cast<int>(requests_.size()) >= fake_.max_sequences + fake_.max_queue) {
    return WithMetadata(WithReason(absl::ResourceExhaustedError(absl::StrCat(
                                       requests_.size(), " requests are waiting or running")),
                                   "QUEUE_FULL"),
                        "limit", fake_.max_queue);
  }
  auto running = std::make_shared<Running>();
  running->id = next_id_++;
  running->prompt_tokens = prompt_tokens;
  running->submitted = absl::Now();
  if (fake_.echo) running->echo = Echo(request.prompt);
  last_request_ = request;
  running->request = std::move(request);
  running->sink = std::move(sink);
  state_.prompt_tokens_total += prompt_tokens;
  requests_.push_back(running);
  return running->id;
}

void FakeEngine::Cancel(RequestId id) {
  std::lock_guard lock(mutex_);
  for (const auto& running : requests_) {
    if (running->id != id) continue;
    running->cancelled = true;
    cancels_[running->request.request_id] = absl::Now();
  }
}

bool FakeEngine::Abort(std::string_view request_id) {
  std::lock_guard lock(mutex_);
  for (const auto& running : requests_) {
    if (running->request.request_id != request_id) continue;
    running->aborted = true;
    return true;
  }
  return false;
}

absl::StatusOr<std::vector<TokenId>> FakeEngine::Tokenize(
    const std::vector<runtime::PromptSegment>& segments, std::optional<bool> add_bos) const {
  if (!fake_.has_tokenizer) {
    return WithReason(absl::FailedPreconditionError("the checkpoint has no tokenizer"),
                      "NO_TOKENIZER");
  }
  std::vector<TokenId> tokens;
  if (add_bos.value_or(false)) tokens.push_back(1);
  for (const auto& segment : segments) {
    for (const char c : segment.text) tokens.push_back(static_cast<unsigned char>(c));
  }
  return tokens;
}

std::string FakeEngine::TokenBytes(TokenId id) const {
  return std::string(1, static_cast<char>(id));
}

absl::StatusOr<std::string> FakeEngine::Detokenize(const std::vector<TokenId>& ids, bool) const {
  std::string text;
  for (const TokenId id : ids) {
    if (id < 0 || id >= kVocabSize) {
      return runtime::InvalidTokenId(id, text.size(), kVocabSize, "token_ids");
    }
    text += TokenBytes(id);
  }
  return text;
}

absl::StatusOr<runtime::ShareReply> FakeEngine::SetCpuShare(const runtime::ShareUpdate& update) {
  RETURN_IF_ERROR(update.table.Validate());
  std::lock_guard lock(mutex_);
  runtime::ShareReply reply;
  const bool other_lease = absl::Now() < lease_end_ &&
                           share_.controller_id != update.controller_id &&
                           !absl::StartsWith(update.controller_id, "operator:");
  if (update.generation <= share_.generation || other_lease) {
    reply.outcome = runtime::ShareOutcome::kStale;
  } else {
    share_.generation = update.generation;
    share_.controller_id = update.controller_id;
    share_.table = update.table;
    share_time_ = absl::Now();
    lease_end_ = absl::Now() + update.valid_for;
    const int moved = roofline::ClampTable(
        share_.table, {.min_share = share_.min_cpu_share, .max_share = share_.max_cpu_share});
    reply.outcome = moved > 0 ? runtime::ShareOutcome::kClamped : runtime::ShareOutcome::kApplied;
  }
  reply.in_force = ShareLocked();
  return reply;
}

runtime::ShareState FakeEngine::ShareLocked() const {
  runtime::ShareState share = share_;
  share.expires_in = std::max(absl::ZeroDuration(), lease_end_ - absl::Now());
  if (share.expires_in == absl::ZeroDuration()) share.controller_id.clear();
  if (share_time_ != absl::InfinitePast()) share.since_update = absl::Now() - share_time_;
  return share;
}

runtime::ShareState FakeEngine::share() const {
  std::lock_guard lock(mutex_);
  return ShareLocked();
}

roofline::MachineProfile FakeEngine::machine_profile() const {
  roofline::MachineProfile profile;
  profile.name = "fake";
  profile.rates = {.cpu_alone = 4e9, .cpu_with_link = 3e9, .link_alone = 2e9, .link_with_cpu = 2e9};
  profile.cpu_workers = 1;
  profile.handoff_per_layer_seconds = 8e-6;
  profile.num_layers = model_.num_layers;
  return profile;
}

absl::Status FakeEngine::SetLinkPace(double bytes_per_s) {
  if (!fake_.link_simulated) {
    return absl::FailedPreconditionError("the link is real; its pace cannot be set");
  }
  std::lock_guard lock(mutex_);
  state_.link_pace_bytes_per_s = bytes_per_s;
  return absl::OkStatus();
}

runtime::EngineState FakeEngine::state() const {
  std::lock_guard lock(mutex_);
  runtime::EngineState state = state_;
  const int total = static_cast<int>(requests_.size());
  state.running_requests = std::min(total, fake_.max_sequences);
  state.waiting_requests = total - state.running_requests;
  if (fake_.edit_state) fake_.edit_state(state);
  return state;
}

bool FakeEngine::AwaitIdle(absl::Duration timeout) {
  std::unique_lock lock(mutex_);
  return TimedWait(idle_, lock, timeout, [this] { return requests_.empty(); });
}

void FakeEngine::Stop() {
  stopped_.store(true);
  if (thread_.joinable()) thread_.join();
  std::vector<std::shared_ptr<Running>> left;
  {
    std::lock_guard lock(mutex_);
    left.swap(requests_);
    idle_.notify_all();
  }
  for (const auto& running : left) {
    Done(*running, WithReason(absl::UnavailableError("the worker is shutting down"), "DRAINING"),
         std::nullopt);
  }
}

absl::Time FakeEngine::last_heartbeat() const { return absl::FromUnixNanos(heartbeat_ns_.load()); }

void FakeEngine::Loop() {
  while (!stopped_.load()) {
    absl::SleepFor(fake_.step);
    if (frozen_.load()) continue;
    heartbeat_ns_.store(absl::GetCurrentTimeNanos());
    StepAll();
  }
}

void FakeEngine::StepAll() {
  std::vector<std::shared_ptr<Running>> batch;
  runtime::StepStats stats;
  {
    std::lock_guard lock(mutex_);
    const size_t count = std::min(requests_.size(), static_cast<size_t>(fake_.max_sequences));
    batch.assign(requests_.begin(), requests_.begin() + static_cast<std::ptrdiff_t>(count));
    if (batch.empty()) return;
    stats.step = ++state_.steps_total;
    stats.end_time = absl::Now();
    stats.step_seconds = absl::ToDoubleSeconds(fake_.step);
    stats.predicted_step_seconds = stats.step_seconds * 1.1;
    stats.batch_size = static_cast<int>(count);
    stats.spilled_bytes = 1000 * static_cast<int64_t>(count);
    stats.planned_cpu_share = share_.table.Lookup(static_cast<uint32_t>(count),
                                                  static_cast<uint64_t>(stats.spilled_bytes));
    stats.cpu_bytes =
        static_cast<int64_t>(stats.planned_cpu_share * static_cast<double>(stats.spilled_bytes));
    stats.link_bytes = stats.spilled_bytes - stats.cpu_bytes;
    stats.observed_cpu_share =
        static_cast<double>(stats.cpu_bytes) / static_cast<double>(stats.spilled_bytes);
    stats.share_generation = share_.generation;
    share_.last_cpu_share = stats.observed_cpu_share;
    state_.cpu_attended_bytes_total += stats.cpu_bytes;
    state_.device_attended_bytes_total += stats.link_bytes;
    state_.upload_bytes_total += stats.link_bytes;
    state_.cpu_busy_seconds_total += stats.step_seconds * stats.observed_cpu_share;
    state_.last_decode_step = stats;
  }
  if (observer_ != nullptr) observer_->OnStep(stats);
  for (const auto& running : batch) Step(*running);
}

void FakeEngine::Step(Running& running) {
  bool cancelled = false;
  bool aborted = false;
  {
    std::lock_guard lock(mutex_);
    cancelled = running.cancelled;
    aborted = running.aborted;
  }
  if (cancelled) {
    Done(running, WithReason(absl::CancelledError("cancelled"), "CANCELLED"), std::nullopt);
    return;
  }
  runtime::GenerateEvent event;
  event.usage.prompt_tokens = running.prompt_tokens;
  if (++running.steps <= fake_.prefill_steps && !aborted) {
    runtime::PromptProgress& progress = event.progress.emplace();
    progress.tokens_done = running.prompt_tokens * running.steps / fake_.prefill_steps;
    progress.tokens_total = running.prompt_tokens;
  }
  const int64_t max_tokens =
      fake_.echo ? 1 : running.request.stopping.max_tokens.value_or(fake_.default_max_tokens);
  if (!event.progress.has_value() && !aborted && running.generated < max_tokens) {
    const auto index = static_cast<size_t>(running.generated) % fake_.words.size();
    event.text = fake_.echo ? running.echo : fake_.words[index];
    event.tokens = {static_cast<TokenId>(index + 1)};
    ++running.generated;
    std::lock_guard lock(mutex_);
    ++state_.generated_tokens_total;
  }
  event.usage.generated_tokens = running.generated;
  std::optional<runtime::FinishReason> reason;
  if (aborted) {
    reason = runtime::FinishReason::kAborted;
  } else if (!event.progress.has_value() && running.generated >= max_tokens) {
    reason = runtime::FinishReason::kMaxTokens;
  }
  if (reason.has_value()) {
    event.finish.emplace().reason = *reason;
    event.placement = {.gpu_resident_tokens = 10, .gpu_streamed_tokens = 20, .cpu_tokens = 30};
  }
  if (observer_ != nullptr && running.generated > 1) {
    observer_->OnInterTokenSeconds(absl::ToDoubleSeconds(fake_.step));
  }
  if (!Emit(running, std::move(event))) {
    slow_consumers_.fetch_add(1);
    Done(running,
         WithReason(absl::ResourceExhaustedError("the reader is too slow"), "SLOW_CONSUMER"),
         std::nullopt);
    return;
  }
  if (reason.has_value()) Done(running, absl::OkStatus(), reason);
}

bool FakeEngine::Emit(const Running& running, runtime::GenerateEvent event) {
  if (fake_.edit_event) fake_.edit_event(event);
  return running.sink->OnEvent(std::move(event));
}

void FakeEngine::Done(const Running& running, const absl::Status& status,
                      std::optional<runtime::FinishReason> reason) {
  {
    // Before the client hears of it: it may use the id again.
    std::lock_guard lock(mutex_);
    std::erase_if(requests_, [&](const auto& other) { return other.get() == &running; });
    if (requests_.empty()) idle_.notify_all();
  }
  if (observer_ != nullptr) {
    runtime::RequestTimes times;
    times.request_id = running.request.request_id;
    times.status = status;
    times.reason = reason;
    times.usage = {.prompt_tokens = running.prompt_tokens, .generated_tokens = running.generated};
    times.first_token_seconds = running.generated > 0 ? 0.01 : -1;
    times.total_seconds = absl::ToDoubleSeconds(absl::Now() - running.submitted);
    if (running.cancelled) times.cancel_seconds = 0.001;
    observer_->OnRequestDone(times);
  }
  running.sink->OnDone(status);
}

}  // namespace writescope::testing_support
