#include "engine/runtime/step_loop.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/check.h"
#include "engine/base/log.h"
#include "engine/base/timed_wait.h"
#include "engine/runtime/error_reason.h"

namespace writescope::runtime {
namespace {

// How long the idle loop sleeps at most; deadlines and progress messages are looked at this often.
constexpr absl::Duration kIdleWait = absl::Milliseconds(100);

}  // namespace

StepLoop::StepLoop(const EngineOptions& options, ModelRunner& runner, device::Device& device,
                   CpuShareSlot& share, StepModel model, EngineObserver* observer,
                   std::function<void(const ActiveRequest&)> on_end)
    : options_(options),
      runner_(runner),
      device_(device),
      share_(share),
      observer_(observer),
      on_end_(std::move(on_end)),
      planner_({.cut = options.cut,
                .micro_batching = options.micro_batching,
                .shares = {options.min_cpu_share, options.max_cpu_share}},
               std::move(model)),
      tuner_(runner.attention().num_workers()) {
  state_.cpu_workers = runner_.attention().num_workers();
  state_.cut = options_.cut;
  Beat();
  PublishState();
}

StepLoop::~StepLoop() { Stop(); }

void StepLoop::Start() {
  thread_ = std::thread([this] { Run(); });
}

bool StepLoop::Post(std::unique_ptr<ActiveRequest>& request) {
  std::lock_guard lock(mutex_);
  if (closed_) return false;
  inbox_.push_back(std::move(request));
  WakeLocked();
  return true;
}

void StepLoop::Wake() {
  std::lock_guard lock(mutex_);
  WakeLocked();
}

void StepLoop::WakeLocked() {
  wake_ = true;
  woken_.notify_one();
}

void StepLoop::Stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    WakeLocked();
  }
  if (thread_.joinable()) thread_.join();
}

EngineState StepLoop::state() const {
  std::lock_guard lock(mutex_);
  EngineState state = published_;
  state.held_requests = state.waiting_requests;
  state.waiting_requests += static_cast<int>(inbox_.size());
  return state;
}

void StepLoop::Beat() {
  heartbeat_ns_.store(absl::ToUnixNanos(clock_.Now()), std::memory_order_relaxed);
}

void StepLoop::Run() {
  while (true) {
    Beat();
    {
      std::lock_guard lock(mutex_);
      if (stop_) break;
      wake_ = false;
    }
    TakeInbox();
    EndAskedFor();
    ResumePaused();
    Admit();
    PublishCounts();
    const bool ran = RunChosenStep();
    FinishEnded();
    ReportProgress();
    PublishState();
    if (!state_.health.ok()) break;
    if (!ran) {
      std::unique_lock lock(mutex_);
      TimedWait(woken_, lock, kIdleWait, [this] { return wake_; });
    }
  }
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  TakeInbox();
  EndAll(state_.health.ok()
             ? WithReason(absl::UnavailableError("the worker is shutting down"), "DRAINING")
             : WithReason(absl::UnavailableError(state_.health.message()), "ENGINE_FAILED"));
  PublishState();
}

void StepLoop::TakeInbox() {
  std::lock_guard lock(mutex_);
  for (std::unique_ptr<ActiveRequest>& request : inbox_) waiting_.push_back(std::move(request));
  inbox_.clear();
}

std::optional<absl::Status> StepLoop::ReasonToEnd(ActiveRequest& request, absl::Time now) {
  RequestControl& control = request.control();
  const absl::Time deadline = request.request().deadline;
  if (now > deadline) control.Cancel(deadline);
  if (control.cancelled.load(std::memory_order_acquire)) {
    // A deadline too cancels: this is asked more than once, and the server is told of it as well.
    if (control.CancelledSince(deadline)) {
      return WithReason(absl::DeadlineExceededError("the client's deadline has passed"),
                        "DEADLINE_EXCEEDED");
    }
    return WithReason(absl::CancelledError("the client cancelled the request"), "CANCELLED");
  }
  if (request.slow_reader()) return SlowReaderStatus();
  if (control.aborted.load(std::memory_order_acquire)) {
    request.SetFinish({.reason = FinishReason::kAborted});
    return absl::OkStatus();
  }
  if (now - request.submitted_at() > options_.request_time_limit) {
    request.SetFinish({.reason = FinishReason::kTimeLimit});
    return absl::OkStatus();
  }
  return std::nullopt;
}

void StepLoop::EndAskedFor() {
  const absl::Time now = clock_.Now();
  for (std::unique_ptr<ActiveRequest>& request : running_) {
    if (const auto reason = ReasonToEnd(*request, now)) errors_[request->id()] = *reason;
  }
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (const auto reason = ReasonToEnd(**it, now)) {
      End(**it, *reason);
      it = waiting_.erase(it);
    } else {
      ++it;
    }
  }
  FinishEnded();
}

int64_t StepLoop::Pending(const ActiveRequest& request) const {
  return request.num_tokens() - runner_.cache().length(request.slot);
}

void StepLoop::Admit() {
  while (!waiting_.empty()) {
    ActiveRequest& request = *waiting_.front();
    const int64_t expected = CeilDiv(request.expected_tokens(), kBlockTokens);
    const int64_t reusable =
        request.request().prompt_logprobs.has_value()
            ? 0
            : runner_.cache().HeldPrefixBlocks(request.tokens(), request.num_tokens() - 1);
    // A lone request is let in whatever it hopes for: its prompt fits, and there is nobody to wait
    // for.
    const bool fits = expected - reusable <= runner_.cache().UnpromisedBlocks();
    if (!fits && !running_.empty()) return;
    const int slot = runner_.cache().AddSequence(expected);
    if (slot < 0) return;
    request.slot = slot;
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

void StepLoop::ResumePaused() {
  const auto paused = std::find_if(running_.begin(), running_.end(),
                                   [](const auto& request) { return request->paused; });
  if (paused == running_.end()) return;
  const bool alone = std::none_of(running_.begin(), running_.end(),
                                  [](const auto& request) { return !request->paused; });
  // With room for a block of every running sequence it would not be paused again at once.
  if (alone || runner_.cache().FreeBlocks() > static_cast<int64_t>(running_.size())) {
    (*paused)->paused = false;
  }
}

void StepLoop::StartPrompt(ActiveRequest& request) {
  request.matched_prefix = true;
  request.reading_since = clock_.Now();
  request.reading_from = 0;
  if (!request.read_before) request.prefill_started_at = request.reading_since;
  // Cached positions would have no logits to report.
  if (request.request().prompt_logprobs.has_value()) return;
  const int64_t cached =
      runner_.cache().MatchPrefix(request.slot, request.tokens(), request.num_tokens() - 1);
  request.reading_from = cached;
  // What it finds now it has put there itself.
  if (request.read_before) return;
  request.usage().cached_prompt_tokens = std::min(cached, request.prompt_tokens());
  const int64_t on_device = runner_.cache().DeviceTokens(request.slot);
  state_.prefix_query_tokens_total += request.num_tokens();
  state_.prefix_hit_tokens_device_total += on_device;
  state_.prefix_hit_tokens_host_total += cached - on_device;
}

bool StepLoop::RunChosenStep() {
  std::vector<ActiveRequest*> candidates;
  std::vector<SchedulableSequence> sequences;
  bool behind_long_prompt = false;
  for (std::unique_ptr<ActiveRequest>& request : running_) {
    if (request->paused) continue;
    if (!request->matched_prefix) {
      // Starting now, it might read a prompt that the one before it is just making available.
      if (behind_long_prompt) continue;
      StartPrompt(*request);
    }
    candidates.push_back(request.get());
    sequences.push_back({.pending = Pending(*request)});
    behind_long_prompt |= sequences.back().pending > options_.prefill_chunk_tokens;
  }
  const StepChoice choice =
      ChooseStep(sequences, options_.prefill_chunk_tokens, turns_.prefill_is_over());
  if (choice.kind == StepChoice::Kind::kIdle) return false;
  std::vector<ActiveRequest*> requests;
  std::vector<int64_t> num_tokens;
  for (const StepChoice::Part& part : choice.parts) {
    requests.push_back(candidates[part.index]);
    num_tokens.push_back(part.num_tokens);
  }
  const double began_s = device::NowSeconds();
  if (choice.kind == StepChoice::Kind::kPrefill) {
    RunPrefill(requests, num_tokens);
    turns_.PrefillTook(device::NowSeconds() - began_s);
  } else {
    RunDecode(requests);
    turns_.DecodeTook(device::NowSeconds() - began_s);
  }
  return true;
}

void StepLoop::FinishEnded() {
  for (auto it = running_.begin(); it != running_.end();) {
    ActiveRequest& request = **it;
    const auto error = errors_.find(request.id());
    if (error == errors_.end() && !request.finish().has_value()) {
      ++it;
      continue;
    }
    End(request, error == errors_.end() ? absl::OkStatus() : error->second);
    it = running_.erase(it);
  }
  errors_.clear();
}

void StepLoop::End(ActiveRequest& request, const absl::Status& status) {
  PlacementReport placement = request.placement();
  CountTokens(request);
  if (request.slot >= 0 && runner_.Ok()) {
    const kvcache::SequencePlacement bytes = runner_.cache().Placement(request.slot);
    placement.device_bytes = bytes.bytes[static_cast<size_t>(kvcache::RegionKind::kDevice)];
    placement.stream_bytes = bytes.bytes[static_cast<size_t>(kvcache::RegionKind::kStream)];
    placement.swing_bytes = bytes.bytes[static_cast<size_t>(kvcache::RegionKind::kSwing)];
    placement.host_bytes = bytes.bytes[static_cast<size_t>(kvcache::RegionKind::kHost)];
    runner_.cache().RemoveSequence(request.slot);
    request.slot = -1;
  }
  on_end_(request);
  const absl::Status told = request.Complete(status, placement);
  const RequestTimes times = request.Times(told, clock_.Now());
  // The server says it once more, with what its client was told.
  Log(LogLevel::kDebug, "request ended",
      {{"request_id", request.request_id()},
       {"status", absl::StatusCodeToString(told.code())},
       {"reason", ErrorReason(told)},
       {"prompt_tokens", times.usage.prompt_tokens},
       {"cached_tokens", times.usage.cached_prompt_tokens},
       {"generated_tokens", times.usage.generated_tokens},
       {"seconds", times.total_seconds}});
  if (observer_ != nullptr) observer_->OnRequestDone(times);
}

void StepLoop::ReportProgress() {
  const absl::Time now = clock_.Now();
  for (std::unique_ptr<ActiveRequest>& request : running_) {
    if (request->slot < 0) continue;
    request->ReportProgress(runner_.cache().length(request->slot), 0, options_.progress_interval,
                            now);
  }
  int64_t position = 1;
  for (std::unique_ptr<ActiveRequest>& request : waiting_) {
    request->ReportProgress(0, position++, options_.progress_interval, now);
  }
}

void StepLoop::FailEngine(const absl::Status& status) {
  Log(LogLevel::kError, "the engine cannot go on", {{"status", status.ToString()}});
  state_.health = status;
}

void StepLoop::EndAll(const absl::Status& status) {
  for (std::unique_ptr<ActiveRequest>& request : running_) End(*request, status);
  for (std::unique_ptr<ActiveRequest>& request : waiting_) End(*request, status);
  running_.clear();
  waiting_.clear();
}

void StepLoop::CountTokens(ActiveRequest& request) {
  // Read a second time, after it was dropped, a prompt does not count again.
  if (request.slot >= 0) {
    const int64_t read =
        std::min<int64_t>(runner_.cache().length(request.slot), request.prompt_tokens());
    state_.prompt_tokens_total += std::max<int64_t>(read - request.counted_prompt_tokens, 0);
    request.counted_prompt_tokens = std::max(request.counted_prompt_tokens, read);
  }
  const int64_t generated = request.usage().generated_tokens;
  state_.generated_tokens_total += generated - request.counted_generated_tokens;
  request.counted_generated_tokens = generated;
}

// A step can take seconds: meanwhile who runs and who waits is as it is in it.
void StepLoop::PublishCounts() {
  std::lock_guard lock(mutex_);
  published_.running_requests = static_cast<int>(running_.size());
  published_.waiting_requests = static_cast<int>(waiting_.size());
}

void StepLoop::PublishState() {
  for (std::unique_ptr<ActiveRequest>& request : running_) CountTokens(*request);
  state_.running_requests = static_cast<int>(running_.size());
  state_.waiting_requests = static_cast<int>(waiting_.size());
  state_.regions.clear();
  const kvcache::BlockTable& blocks = runner_.cache().blocks();
  const int64_t unit_bytes = blocks.geometry().block_bytes() * blocks.num_layers();
  for (const kvcache::RegionUsage& usage : blocks.Usage()) {
    state_.regions.push_back({.region = static_cast<RegionName>(usage.region),
                              .capacity_bytes = usage.capacity * unit_bytes,
                              .used_bytes = usage.used * unit_bytes,
                              .cached_bytes = usage.cached * unit_bytes,
                              .retained_bytes = usage.retained * unit_bytes,
                              .page_locked = usage.region == kvcache::RegionKind::kStream ||
                                             usage.region == kvcache::RegionKind::kSwing});
  }
  state_.moved_bytes_total = blocks.moved_bytes();
  state_.replayed_steps_total = runner_.recording_counts().replayed_steps;
  state_.step_graph_failures_total = runner_.recording_counts().failures;
  state_.download_bytes_total = runner_.cache().committed_bytes();
  std::lock_guard lock(mutex_);
  published_ = state_;
}

}  // namespace writescope::runtime
