// The steps of StepLoop: prefill, decode over spilled KV, decode of resident sequences.
#include <algorithm>
#include <optional>
#include <utility>

#include "engine/base/check.h"
#include "engine/base/log.h"
#include "engine/runtime/error_reason.h"
#include "engine/runtime/step_loop.h"

namespace writescope::runtime {
namespace {

// Between two looks at what a hybrid step waits for.
constexpr absl::Duration kBetweenNap = absl::Microseconds(20);
// Device blocks that retained copies leave free, as a fraction of the region.
constexpr int64_t kRetainKeepFreeDivisor = 128;

std::span<const TokenId> NextTokens(const ActiveRequest& request, int64_t length, int64_t count) {
  // Past the end would be whatever lies there: an answer to it, or a crash.
  CHECK_LE(length + count, request.num_tokens()) << "request " << request.request_id();
  return std::span(request.tokens())
      .subspan(static_cast<size_t>(length), static_cast<size_t>(count));
}

}  // namespace

void StepLoop::RunPrefill(const std::vector<ActiveRequest*>& requests,
                          const std::vector<int64_t>& num_tokens) {
  std::vector<StepSlice> slices;
  int64_t total = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    ActiveRequest& request = *requests[i];
    const bool reaches_end = num_tokens[i] == Pending(request);
    slices.push_back(
        {.slot = request.slot,
         .tokens = NextTokens(request, runner_.cache().length(request.slot), num_tokens[i]),
         .logits = request.wanted_logits(reaches_end),
         .only_largest = request.wants_only_largest()});
    total += num_tokens[i];
  }
  StepOptions options;
  options.cancelled = [&] {
    Beat();
    ReportProgress();
    return std::all_of(requests.begin(), requests.end(), [&](ActiveRequest* request) {
      return ReasonToEnd(*request, clock_.Now()).has_value();
    });
  };
  const double began_s = device::NowSeconds();
  int full_slice = -1;
  const absl::StatusOr<StepResult> result = runner_.Run(
      slices, options,
      [&](int slice, int64_t position, const RowLogits& logits) {
        TakeLogits(requests, slice, position, logits);
      },
      &full_slice);
  if (!result.ok()) {
    HandleStepError(requests, result.status(), full_slice);
    return;
  }
  FinishWithoutTokens(requests);
  ReportStep(StepKind::kPrefill, total, result->attention, device::NowSeconds() - began_s,
             static_cast<int>(requests.size()), {});
}

void StepLoop::FinishWithoutTokens(const std::vector<ActiveRequest*>& requests) {
  for (ActiveRequest* request : requests) {
    if (Pending(*request) == 0 && !request->finish().has_value() &&
        !errors_.contains(request->id())) {
      request->FinishWithoutTokens();
    }
  }
}

void StepLoop::TakeLogits(const std::vector<ActiveRequest*>& requests, int slice, int64_t position,
                          const RowLogits& logits) {
  ActiveRequest& request = *requests[static_cast<size_t>(slice)];
  const absl::Status status = request.OnLogits(position, logits, clock_.Now());
  if (!status.ok()) {
    if (ErrorReason(status) == "NUMERIC_FAILURE") ++state_.nan_logits_total;
    errors_.try_emplace(request.id(), status);
  }
  if (const auto seconds = request.TakeInterTokenSeconds(); seconds && observer_ != nullptr) {
    observer_->OnInterTokenSeconds(*seconds);
  }
}

void StepLoop::RunDecode(const std::vector<ActiveRequest*>& requests) {
  std::vector<ActiveRequest*> resident;
  std::vector<ActiveRequest*> spilled;
  for (ActiveRequest* request : requests) {
    (runner_.IsResident(request->slot) ? resident : spilled).push_back(request);
  }
  if (spilled.empty()) {
    const int batch_size = static_cast<int>(resident.size());
    std::vector<int> slots;
    slots.reserve(resident.size());
    for (const ActiveRequest* request : resident) slots.push_back(request->slot);
    StepStats step;
    step.predicted_step_seconds =
        planner_.model().PredictSeconds(batch_size, runner_.BytesOf(slots), 0);
    const double began_s = device::NowSeconds();
    if (!RunResident(resident)) return;
    const double step_s = device::NowSeconds() - began_s;
    attention::AttentionStats stats;
    stats.dense_s = step_s;
    ReportStep(StepKind::kDecode, 0, stats, step_s, batch_size, step);
  } else {
    RunHybrid(spilled, resident);
  }
}

bool StepLoop::RunResident(const std::vector<ActiveRequest*>& requests) {
  std::vector<StepSlice> slices;
  std::vector<int64_t> lengths;
  for (ActiveRequest* request : requests) {
    lengths.push_back(runner_.cache().length(request->slot));
    slices.push_back({.slot = request->slot,
                      .tokens = NextTokens(*request, lengths.back(), 1),
                      .logits = request->wanted_logits(true),
                      .only_largest = request->wants_only_largest()});
  }
  int full_slice = -1;
  const absl::Status status = runner_.RunResident(
      slices,
      [&](int slice, int64_t position, const RowLogits& logits) {
        TakeLogits(requests, slice, position, logits);
      },
      &full_slice);
  if (!status.ok()) {
    HandleStepError(requests, status, full_slice);
    return false;
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i]->AddAttention({.resident_tokens = lengths[i] + 1}, 0);
  }
  FinishWithoutTokens(requests);
  return true;
}

void StepLoop::StepResidentBetween(std::vector<ActiveRequest*>& resident, ResidentPacer& pacer,
                                   const std::function<bool()>& still_waiting) {
  while (still_waiting()) {
    const double now_s = device::NowSeconds();
    if (resident.empty() || !pacer.MayStep(now_s)) {
      absl::SleepFor(kBetweenNap);
      continue;
    }
    // Sequences that ended, or whose next block found no room on the device, wait for the step's
    // end.
    std::erase_if(resident, [&](ActiveRequest* request) {
      return request->finish().has_value() || errors_.contains(request->id()) ||
             request->control().cancelled.load() || !runner_.IsResident(request->slot);
    });
    if (resident.empty()) continue;
    if (!RunResident(resident)) resident.clear();
    pacer.AddStep(device::NowSeconds() - now_s);
  }
}

void StepLoop::PlanHybrid(std::span<const int> slots, StepOptions* options, StepStats* stats) {
  const StepBytes bytes = runner_.BytesOf(slots);
  const double cpu_share =
      share_.Lookup(static_cast<int>(slots.size()), bytes.spilled, &stats->share_generation);
  // The engine's own table is of whole steps; a controller or an operator has the last word.
  StepPlanner::Plan plan = planner_.PlanStep(
      runner_, slots, bytes, {.cpu_share = cpu_share, .is_set = stats->share_generation != 0});
  options->share = plan.share;
  options->micro_batches = std::move(plan.micro_batches);
  if (options_.tune_workers) options->share.num_workers = tuner_.num_workers();
  stats->predicted_step_seconds = plan.predicted_seconds;
  stats->planned_cpu_share = plan.share.cpu_share;
}

void StepLoop::RunHybrid(const std::vector<ActiveRequest*>& requests,
                         const std::vector<ActiveRequest*>& resident) {
  std::vector<StepSlice> slices;
  std::vector<int> slots;
  for (ActiveRequest* request : requests) {
    slots.push_back(request->slot);
    slices.push_back({.slot = request->slot,
                      .tokens = NextTokens(*request, runner_.cache().length(request->slot), 1),
                      .logits = request->wanted_logits(true),
                      .only_largest = request->wants_only_largest()});
  }
  StepStats stats;
  StepOptions options;
  PlanHybrid(slots, &options, &stats);
  if (options_.retention) {
    options.retain_keep_free =
        runner_.cache().blocks().region(kvcache::RegionKind::kDevice).num_blocks() /
        kRetainKeepFreeDivisor;
  }
  options.cancelled = [&] {
    Beat();
    return std::all_of(requests.begin(), requests.end(),
                       [](ActiveRequest* request) { return request->control().cancelled.load(); });
  };
  const double began_s = device::NowSeconds();
  ResidentPacer pacer(began_s);
  std::vector<ActiveRequest*> stepping = resident;
  if (!resident.empty()) {
    options.between = [&](const std::function<bool()>& still_waiting) {
      StepResidentBetween(stepping, pacer, still_waiting);
    };
  }
  int full_slice = -1;
  hybrid_running_ = true;
  const absl::StatusOr<StepResult> result = runner_.Run(
      slices, options,
      [&](int slice, int64_t position, const RowLogits& logits) {
        TakeLogits(requests, slice, position, logits);
      },
      &full_slice);
  hybrid_running_ = false;
  if (!result.ok()) {
    HandleStepError(requests, result.status(), full_slice);
    return;
  }
  const double step_s = device::NowSeconds() - began_s - pacer.spent_s();
  const int64_t bytes_per_token = runner_.cache().bytes_per_token();
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i]->AddAttention(result->slices[i], bytes_per_token);
  }
  FinishWithoutTokens(requests);
  const int batch_size = static_cast<int>(requests.size());
  stats.micro_batches = result->micro_batches;
  if (options.share.num_workers > 0) stats.cpu_workers = options.share.num_workers;
  ReportStep(StepKind::kDecode, 0, result->attention, step_s, batch_size, stats);
  LearnFrom(*result, batch_size, stats.predicted_step_seconds, step_s);
  // Nobody may starve, also when the CPU leaves no idle time. Who had spilled blocks kept on the
  // device may have lost them to blocks of this step.
  stepping = resident;
  std::erase_if(stepping, [&](ActiveRequest* request) {
    return request->paused || request->finish().has_value() || errors_.contains(request->id()) ||
           !runner_.IsResident(request->slot);
  });
  if (pacer.num_steps() == 0 && !stepping.empty()) RunResident(stepping);
}

void StepLoop::LearnFrom(const StepResult& result, int batch_size, double predicted_s,
                         double step_s) {
  const attention::AttentionStats& attention = result.attention;
  std::optional<roofline::ShareTable> table = planner_.Learn({.batch_size = batch_size,
                                                              .micro_batches = result.micro_batches,
                                                              .predicted_seconds = predicted_s,
                                                              .seconds = step_s},
                                                             attention, device::NowSeconds());
  if (table.has_value()) share_.SetOwn(*std::move(table));
  if (!options_.tune_workers || attention.cpu_bytes == 0 || predicted_s <= 0) return;
  const int before = tuner_.best();
  if (tuner_.Learn({.batch_size = batch_size,
                    .micro_batches = result.micro_batches,
                    .cost = step_s / predicted_s})) {
    state_.cpu_workers = tuner_.best();
    Log(LogLevel::kInfo, "another number of CPU workers is faster",
        {{"from", before}, {"to", tuner_.best()}});
  }
}

void StepLoop::HandleStepError(const std::vector<ActiveRequest*>& requests,
                               const absl::Status& status, int full_slice) {
  if (absl::IsResourceExhausted(status) && full_slice >= 0) {
    MakeRoom(requests);
    return;
  }
  // Who asked for it is ended in the next round.
  if (absl::IsCancelled(status)) return;
  // Nothing was done: the next round finds out anew who is resident.
  if (absl::IsAborted(status)) return;
  if (absl::IsDataLoss(status) && full_slice >= 0) {
    errors_[requests[static_cast<size_t>(full_slice)]->id()] = WithReason(status, "KV_INTEGRITY");
    return;
  }
  ++state_.failed_steps_total;
  Log(LogLevel::kError, "a step failed",
      {{"status", status.ToString()}, {"requests", requests.size()}});
  for (ActiveRequest* request : requests) {
    errors_[request->id()] = WithReason(
        absl::InternalError(absl::StrCat("the step failed: ", std::string(status.message()))),
        "STEP_FAILED");
  }
  if (!runner_.Ok()) FailEngine(status);
}

void StepLoop::MakeRoom(const std::vector<ActiveRequest*>& requests) {
  // The youngest of the step gives way: it keeps its blocks, and steps again when there is room.
  // Inside a hybrid step nobody else may be touched.
  if (requests.size() > 1 || hybrid_running_) {
    requests.back()->paused = true;
    ++state_.preemptions_pause_total;
    return;
  }
  // Its blocks are all that stands in the way: the youngest paused sequence gives them up and is
  // read again later.
  for (auto it = running_.rbegin(); it != running_.rend(); ++it) {
    ActiveRequest& victim = **it;
    if (&victim == requests.front()) continue;
    if (!victim.paused) {
      victim.paused = true;
      ++state_.preemptions_pause_total;
      return;
    }
    runner_.cache().RemoveSequence(victim.slot);
    victim.slot = -1;
    victim.paused = false;
    victim.read_before |= victim.matched_prefix;
    victim.matched_prefix = false;
    ++state_.preemptions_drop_total;
    Log(LogLevel::kWarning, "sequence dropped; it will be read again",
        {{"request_id", victim.request_id()}, {"tokens", victim.num_tokens()}});
    waiting_.push_front(std::move(*it));
    running_.erase(std::next(it).base());
    return;
  }
  errors_[requests.front()->id()] =
      WithReason(absl::ResourceExhaustedError(absl::StrCat("the KV cache has no room for token ",
                                                           requests.front()->num_tokens(),
                                                           " of this request")),
                 "KV_CAPACITY_EXCEEDED");
}

void StepLoop::ReportStep(StepKind kind, int64_t prefill_tokens,
                          const attention::AttentionStats& attention, double step_seconds,
                          int batch_size, StepStats stats) {
  stats.step = ++state_.steps_total;
  stats.kind = kind;
  stats.end_time = clock_.Now();
  stats.step_seconds = step_seconds;
  stats.batch_size = batch_size;
  stats.prefill_tokens = prefill_tokens;
  stats.spilled_bytes = attention.spilled_bytes;
  stats.stream_region_bytes = attention.stream_region_bytes;
  stats.host_region_bytes = attention.host_region_bytes;
  stats.cpu_bytes = attention.cpu_bytes;
  stats.link_bytes = attention.link_bytes;
  stats.resident_bytes = attention.resident_bytes;
  stats.cpu_busy_seconds = attention.cpu_busy_s;
  stats.link_busy_seconds = attention.link_busy_s;
  stats.both_busy_seconds = attention.both_busy_s;
  stats.dense_seconds = attention.dense_s;
  stats.device_attention_seconds = attention.device_attention_s;
  stats.cpu_bytes_both_busy = attention.cpu_bytes_both_busy;
  stats.link_bytes_both_busy = attention.link_bytes_both_busy;
  stats.copies = attention.copies;
  if (stats.cpu_workers == 0) stats.cpu_workers = state_.cpu_workers;
  stats.observed_cpu_share =
      attention.spilled_bytes == 0
          ? 0
          : static_cast<double>(attention.cpu_bytes) / static_cast<double>(attention.spilled_bytes);
  stats.moved_bytes_total = runner_.cache().blocks().moved_bytes();
  state_.upload_bytes_total += attention.link_bytes;
  state_.cpu_attended_bytes_total += attention.cpu_bytes;
  state_.device_attended_bytes_total += attention.link_bytes + attention.resident_bytes;
  state_.cpu_busy_seconds_total += attention.cpu_busy_s;
  state_.link_busy_seconds_total += attention.link_busy_s;
  state_.device_attention_seconds_total += attention.device_attention_s;
  if (kind == StepKind::kDecode) {
    if (stats.spilled_bytes > 0) share_.SetLastShare(stats.observed_cpu_share);
    if (stats.micro_batches == 2) ++state_.ping_pong_steps_total;
    state_.last_decode_step = stats;
  }
  if (observer_ != nullptr) observer_->OnStep(stats);
}

}  // namespace writescope::runtime
