#include "engine/attention/hybrid_attention.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/check.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace writescope::attention {

using kvcache::RegionKind;

absl::StatusOr<std::unique_ptr<HybridAttention>> HybridAttention::Create(
    const Options& options, ops::Ops& ops, const kvcache::BlockTable& blocks) {
  // The CPU rounds where the device does: its queries were bf16 before they were scaled.
  const auto products = ops.activation_bytes() == 2 ? kernels::AttentionProducts::kBf16
                                                    : kernels::AttentionProducts::kF32;
  ASSIGN_OR_RETURN(
      std::unique_ptr<CpuAttention> cpu,
      CpuAttention::Create(
          {.geometry = options.geometry,
           .max_turns = kMaxMicroBatches * options.num_layers,
           .num_heads = options.num_heads,
           .max_rows = options.max_sequences,
           .query_dtype = ops.activation_bytes() == 2 ? KvDtype::kBf16 : KvDtype::kF32,
           .num_workers = options.num_workers,
           .nap = options.nap,
           .variant = &CpuAttention::VariantFor(options.geometry, options.num_heads, products)},
          ops.device()));
  ASSIGN_OR_RETURN(std::unique_ptr<LinkPump> pump,
                   LinkPump::Create({.geometry = options.geometry,
                                     .ring_bytes = options.ring_bytes,
                                     .wait_limit = options.wait_limit},
                                    ops.device()));
  return std::unique_ptr<HybridAttention>(
      new HybridAttention(options, ops, blocks, std::move(cpu), std::move(pump)));
}

HybridAttention::HybridAttention(const Options& options, ops::Ops& ops,
                                 const kvcache::BlockTable& blocks,
                                 std::unique_ptr<CpuAttention> cpu, std::unique_ptr<LinkPump> pump)
    : options_(options),
      ops_(ops),
      blocks_(blocks),
      turns_(new TurnProgress[static_cast<size_t>(kMaxMicroBatches * options.num_layers)]),
      cpu_(std::move(cpu)),
      pump_(std::move(pump)),
      team_(WorkerTeam::Create(options.num_workers)),
      turn_times_(static_cast<size_t>(kMaxMicroBatches * options.num_layers)) {}

HybridAttention::~HybridAttention() {
  // After a failed step threads may still be at it, and the pump's may still submit. So they end
  // first, and only then is it known what is left on the queues: it writes times here, and uses the
  // ring and the hand-off memory.
  step_.abort.store(true);
  team_.reset();
  pump_->Stop();
  device::AwaitIdle({&ops_.device().compute(), &ops_.device().upload()}, "hybrid attention");
}

void HybridAttention::BeginStep(std::vector<StepAttention> micro_batches, const SharePlan& plan) {
  CHECK(ok_) << "a thread of an earlier step is still out";
  CHECK(!micro_batches.empty() && micro_batches.size() <= kMaxMicroBatches);
  micro_batches_ = std::move(micro_batches);
  int64_t spilled_blocks = 0;
  int num_rows = 0;
  for (const StepAttention& part : micro_batches_) {
    CHECK_EQ(part.first_row, num_rows);
    num_rows += part.num_rows;
    spilled_blocks += part.runs.spilled_blocks();
  }
  begin_s_ = device::NowSeconds();
  attend_times_.clear();
  slots_read_.clear();
  step_.micro_batches = micro_batches_;
  step_.blocks = &blocks_;
  step_.num_turns = options_.num_layers * step_.num_micro_batches();
  step_.epoch = ++epoch_;
  step_.handoff = plan.handoff && spilled_blocks > 0;
  step_.num_workers = plan.num_workers > 0 ? plan.num_workers : num_workers();
  step_.guided = plan.meet && step_.handoff;
  step_.cpu_share = plan.cpu_share;
  // Of two micro-batches the CPU goes on with the other one's turn: there is no end to share.
  step_.cpu_reserve_bytes = step_.guided && micro_batches_.size() == 1 ? cpu_reserve_.bytes() : 0;
  step_.turns = turns_.get();
  step_.flags = cpu_->flags();
  step_.abort.store(false);
  step_.hook = hook_;
  for (int turn = 0; turn < step_.num_turns; ++turn) {
    const RunList& runs = step_.attention(turn).runs;
    const int64_t swing_blocks = runs.swing.num_blocks();
    int64_t cut = swing_blocks;
    if (step_.handoff) cut = plan.meet ? -1 : CutForShare(runs, plan.cpu_share);
    TurnProgress& progress = turns_[static_cast<size_t>(turn)];
    progress.swing.Reset(swing_blocks, cut);
    progress.host_claimed.store(0);
    progress.cpu_reported.store(0);
    progress.first_start_ns.store(0);
    progress.last_report_ns.store(0);
  }
  if (step_.handoff) {
    CHECK_LE(num_rows, options_.max_sequences);
    // The CPU's kernels take one query a sequence, which sees every sealed block.
    for (const StepAttention& part : micro_batches_) {
      CHECK_EQ(part.num_rows, static_cast<int>(part.rows.size()));
    }
    cpu_->ResetPartials(num_rows);
    team_->Start(step_.num_workers, [this](int worker) { cpu_->RunWorker(worker, step_); });
  }
  pump_->Start(&step_);
}

void HybridAttention::TimedAttend(const ops::AttendArgs& args, const OfWave& of_wave) {
  device::Queue& compute = ops_.device().compute();
  OpTime& time = attend_times_.emplace_back();
  time.of_wave = of_wave;
  compute.RecordTime(&time.start_s);
  ops_.Attend(args);
  if (of_wave.ends_turn < 0) compute.RecordTime(&time.end_s);
}

HybridAttention::DeviceSpans HybridAttention::SpansOnDevice(const StepAttention& step,
                                                            int layer) const {
  DeviceSpans result;
  result.readers = step.runs.readers;
  const kvcache::Region& device = blocks_.region(RegionKind::kDevice);
  // A sequence's open blocks follow its sealed ones: each span costs a thread block of the device
  // some microseconds, and those at the end of the list would all fall to one.
  size_t next_open = 0;
  const auto add_open = [&](int before_reader) {
    for (; next_open < step.open.size() && step.open[next_open].reader < before_reader;
         ++next_open) {
      const StepAttention::Open& open = step.open[next_open];
      result.spans.push_back({.base = open.span.address.At(layer),
                              .num_blocks = 1,
                              .num_tokens = open.span.num_tokens,
                              .first_position = open.span.first_position,
                              .first_reader = static_cast<int>(result.readers.size()),
                              .num_readers = 1,
                              .layer_stride_bytes = open.span.address.stride_bytes});
      result.readers.push_back(open.reader);
    }
  };
  for (const Run& run : step.runs.device) {
    add_open(step.runs.readers[static_cast<size_t>(run.first_reader)]);
    result.spans.push_back({.base = device.Address(layer, run.first_index),
                            .num_blocks = run.num_blocks,
                            .num_tokens = int64_t{run.num_blocks} * kBlockTokens,
                            .first_position = run.first_position,
                            .first_reader = run.first_reader,
                            .num_readers = run.num_readers,
                            .layer_stride_bytes = device.plane_bytes()});
  }
  add_open(static_cast<int>(step.rows.size()));
  return result;
}

void HybridAttention::Meanwhile(const Between& between,
                                const std::function<bool()>& waiting) const {
  if (!between) return;
  // What does not come at all is noticed by the bounded wait that follows.
  const double until_s = device::NowSeconds() + absl::ToDoubleSeconds(options_.wait_limit) / 4;
  between([&] { return waiting() && device::NowSeconds() < until_s; });
}

absl::Status HybridAttention::AttendWaves(int turn, const float* q, const ops::AttendState& state,
                                          const Between& between) {
  const StepAttention& attention = step_.attention(turn);
  device::Queue& compute = ops_.device().compute();
  // Waves that landed, or are about to, are attended to together: a call costs as much as a copy.
  std::vector<ops::AttendSpan> spans;
  int num_waves = 0;
  device::Event landed;
  const auto attend = [&](bool is_last) {
    if (spans.empty()) return;
    // The wait for the CPU tells when the last of a turn ends, if nothing comes in between: what
    // stands between it and the merge costs each layer some microseconds.
    const bool ends_turn = is_last && step_.handoff && !between;
    Meanwhile(between, [&landed] { return !landed.Done(); });
    compute.WaitFor(landed);
    TimedAttend({.kv = options_.geometry,
                 .num_heads = options_.num_heads,
                 .q = q,
                 .spans = spans,
                 .readers = attention.runs.readers,
                 .rows = attention.rows,
                 .state = state},
                {.is_wave = true, .ends_turn = ends_turn ? turn : -1});
    if (!ends_turn) ReleaseSlots();
    spans.clear();
    num_waves = 0;
  };
  while (true) {
    Meanwhile(between, [this] { return !pump_->HasWave(); });
    if (!pump_->HasWave()) compute.WriteTimes();
    const std::optional<Wave> wave = pump_->NextWave();
    if (!wave.has_value()) {
      return absl::DeadlineExceededError(absl::StrCat("the link delivered nothing for layer ",
                                                      step_.layer(turn), " within ",
                                                      absl::FormatDuration(options_.wait_limit)));
    }
    CHECK_EQ(wave->turn, turn);
    if (wave->end_of_turn) break;
    spans.insert(spans.end(), wave->spans.begin(), wave->spans.end());
    if (wave->slot >= 0) slots_read_.push_back(wave->slot);
    landed = wave->landed;
    if (++num_waves >= pump_->waves_per_call()) attend(/*is_last=*/false);
  }
  attend(/*is_last=*/true);
  return absl::OkStatus();
}

void HybridAttention::BeginTurn(int turn, const float* q, const ops::AttendState& state) {
  const StepAttention& attention = step_.attention(turn);
  device::Queue& compute = ops_.device().compute();
  TurnTimes& times = turn_times_[static_cast<size_t>(turn)];
  if (step_.handoff) {
    ops_.PublishQueries(
        {.num_values = attention.num_rows * int64_t{options_.num_heads} * options_.geometry.k_dim,
         .q = q,
         .to = cpu_->queries(attention.first_row),
         .ready = &cpu_->flags()[turn].query_ready,
         .value = step_.epoch,
         .began_s = &times.dense_ended_s,
         .ended_s = &times.query_published_s});
  } else {
    compute.RecordTime(&times.dense_ended_s);
  }
  ReleaseSlots();
  // After the query: the CPU waits for that. And before the other micro-batch's turn ends: until
  // then the device has time.
  ops_.ResetAttention(attention.num_rows, options_.num_heads, options_.geometry.v_dim, state);
  const DeviceSpans on_device = SpansOnDevice(attention, step_.layer(turn));
  TimedAttend({.kv = options_.geometry,
               .num_heads = options_.num_heads,
               .q = q,
               .spans = on_device.spans,
               .readers = on_device.readers,
               .rows = attention.rows,
               .state = state},
              {});
}

void HybridAttention::ReleaseSlots() {
  if (slots_read_.empty()) return;
  const device::Event read = ops_.device().compute().Record();
  for (const int slot : slots_read_) pump_->Release(slot, read);
  slots_read_.clear();
}

absl::Status HybridAttention::EndTurn(int turn, const float* q, const ops::AttendState& state,
                                      void* out, const Between& between) {
  const StepAttention& attention = step_.attention(turn);
  device::Queue& compute = ops_.device().compute();
  TurnTimes& times = turn_times_[static_cast<size_t>(turn)];
  RETURN_IF_ERROR(AttendWaves(turn, q, state, between));
  Meanwhile(between, [this, turn] { return CpuAtWork(turn); });
  if (step_.handoff) {
    // Nothing between attention, this and the merge: each of them begins while the one before ends.
    compute.WaitFlag(&cpu_->flags()[turn].cpu_done, step_.epoch, options_.wait_limit, &times.wait);
  } else {
    compute.RecordTime(&times.wait.seen_s);
  }
  const int64_t first_head = int64_t{attention.first_row} * options_.num_heads;
  ops_.MergeAttention(
      {.kv = options_.geometry,
       .num_rows = attention.num_rows,
       .num_heads = options_.num_heads,
       .out_dim = options_.out_dim,
       .state = state,
       .cpu_out = step_.handoff ? cpu_->out() + first_head * options_.geometry.v_dim : nullptr,
       .cpu_lse = step_.handoff ? cpu_->lse() + first_head : nullptr,
       .behind_wait = step_.handoff,
       .out = out});
  if (turn + 1 == step_.num_turns) ReleaseSlots();
  return absl::OkStatus();
}

bool HybridAttention::CpuAtWork(int turn) const {
  return step_.handoff && step_.flags[turn].cpu_done.load(std::memory_order_acquire) < step_.epoch;
}

absl::Status HybridAttention::Abort(absl::Status why) {
  step_.abort.store(true);
  const bool workers_back = !step_.handoff || team_->AwaitDone(options_.wait_limit * 5);
  const bool pump_back = pump_->AwaitDone(options_.wait_limit * 5);
  bool queues_idle = true;
  device::Device& device = ops_.device();
  for (device::Queue* queue : {&device.compute(), &device.upload(), &device.download()}) {
    queues_idle &= queue->Record().Wait(options_.wait_limit * 15).ok();
    queue->TakeError().IgnoreError();
  }
  ok_ = workers_back && pump_back && queues_idle;
  if (ok_) pump_->ResetRing();
  return why;
}

absl::StatusOr<AttentionStats> HybridAttention::EndStep(device::Event end) {
  // The device's own waits are bounded, so that it gets here, unless it is broken; how long its
  // compute takes is its own affair.
  absl::Status ended;
  do {
    ended = end.Wait(absl::Milliseconds(100));
  } while (absl::IsDeadlineExceeded(ended));
  if (!ended.ok()) return Abort(std::move(ended));
  const double end_s = device::NowSeconds();
  device::Device& device = ops_.device();
  for (device::Queue* queue : {&device.compute(), &device.upload(), &device.download()}) {
    if (absl::Status error = queue->TakeError(); !error.ok()) return Abort(std::move(error));
  }
  if (step_.handoff && !team_->AwaitDone(options_.wait_limit)) {
    return Abort(absl::DeadlineExceededError("a CPU worker did not end its step"));
  }
  if (!pump_->AwaitDone(options_.wait_limit)) {
    return Abort(absl::DeadlineExceededError("the link pump did not end its step"));
  }
  // Copies of retained blocks have been waited for by their readers; this is for the copies' times.
  if (absl::Status idle = device.upload().Record().Wait(options_.wait_limit); !idle.ok()) {
    return Abort(std::move(idle));
  }
  for (OpTime& time : attend_times_) {
    if (time.of_wave.ends_turn < 0) continue;
    time.end_s = turn_times_[static_cast<size_t>(time.of_wave.ends_turn)].wait.began_s;
  }
  AttentionStats stats = CollectStats(begin_s_, end_s);
  if (step_.guided) LearnCpuReserve(stats);
  return stats;
}

void HybridAttention::LearnCpuReserve(const AttentionStats& stats) {
  if (micro_batches_.size() > 1 || stats.cpu_busy_s <= 0 || stats.link_busy_s <= 0) return;
  double late_s = 0;
  int num_turns = 0;
  for (int turn = 0; turn < step_.num_turns; ++turn) {
    const TurnProgress& progress = turns_[static_cast<size_t>(turn)];
    if (progress.cpu_reported.load() == 0) continue;
    late_s += turn_times_[static_cast<size_t>(turn)].wait.began_s -
              static_cast<double>(progress.last_report_ns.load()) * 1e-9;
    ++num_turns;
  }
  if (num_turns == 0) return;
  const auto seconds_a_byte = [](double seconds, int64_t bytes) {
    return seconds / static_cast<double>(std::max<int64_t>(1, bytes));
  };
  cpu_reserve_.Learn(late_s / num_turns, seconds_a_byte(stats.cpu_busy_s, stats.cpu_bytes),
                     seconds_a_byte(stats.link_busy_s, stats.link_bytes));
}

AttentionStats HybridAttention::CollectStats(double begin_s, double end_s) const {
  AttentionStats stats;
  const int64_t block_bytes = options_.geometry.block_bytes();
  const int64_t step_bytes = block_bytes * options_.num_layers;
  for (const StepAttention& part : micro_batches_) {
    stats.spilled_bytes += part.runs.spilled_blocks() * step_bytes;
    stats.stream_region_bytes += part.runs.stream.num_blocks() * step_bytes;
    stats.host_region_bytes += part.runs.host.num_blocks() * step_bytes;
    stats.resident_bytes += part.runs.device_blocks() * step_bytes;
  }
  stats.mean_cut_blocks.resize(micro_batches_.size());
  for (int turn = 0; turn < step_.num_turns; ++turn) {
    const TurnProgress& progress = turns_[static_cast<size_t>(turn)];
    stats.cpu_bytes += progress.cpu_reported.load() * block_bytes;
    stats.mean_cut_blocks[static_cast<size_t>(turn % step_.num_micro_batches())] +=
        static_cast<double>(progress.swing.front()) / options_.num_layers;
    CollectHandoff(progress, turn_times_[static_cast<size_t>(turn)], &stats);
  }
  CollectDense(begin_s, end_s, &stats);
  double attended_until_s = begin_s;
  for (const OpTime& time : attend_times_) {
    stats.device_attention_s += time.end_s - time.start_s;
    if (time.of_wave.is_wave) stats.link_wait_s += std::max(0.0, time.start_s - attended_until_s);
    attended_until_s = time.end_s;
  }
  for (const CopyRecord& copy : pump_->FinishCopies()) {
    stats.link_bytes += copy.size_bytes;
    stats.link_busy_s += copy.end_s - copy.start_s;
    ++stats.copies;
  }
  CollectOverlap(&stats);
  return stats;
}

double HybridAttention::DenseBeganAt(int turn, double begin_s) const {
  if (turn == 0) return begin_s;
  // In the first layer the micro-batches come one behind the other; from then on each one's dense
  // work follows its own attention.
  const int parts = step_.num_micro_batches();
  return turn < parts ? turn_times_[static_cast<size_t>(turn - 1)].dense_ended_s
                      : turn_times_[static_cast<size_t>(turn - parts)].wait.seen_s;
}

void HybridAttention::CollectDense(double begin_s, double end_s, AttentionStats* stats) const {
  // From a query's publication until the device has seen the end of the CPU's work the CPU has one,
  // and with two micro-batches the next comes before that.
  double had_query_until_s = begin_s;
  for (int turn = 0; turn < step_.num_turns; ++turn) {
    const TurnTimes& times = turn_times_[static_cast<size_t>(turn)];
    const double has_query_s = step_.handoff ? times.query_published_s : times.dense_ended_s;
    stats->dense_s += std::max(0.0, has_query_s - had_query_until_s);
    stats->device_dense_s += std::max(0.0, times.dense_ended_s - DenseBeganAt(turn, begin_s));
    had_query_until_s = times.wait.seen_s;
  }
  stats->dense_s += std::max(0.0, end_s - had_query_until_s);
  stats->device_dense_s += std::max(0.0, end_s - had_query_until_s);
}

StepTrace HybridAttention::Trace() const {
  StepTrace trace;
  for (const CopyRecord& copy : pump_->copies()) {
    trace.push_back({Activity::kCopy, -1, copy.start_s, copy.end_s});
  }
  for (const OpTime& time : attend_times_) {
    trace.push_back({Activity::kDeviceAttention, -1, time.start_s, time.end_s});
  }
  for (int turn = 0; turn < step_.num_turns; ++turn) {
    const TurnProgress& progress = turns_[static_cast<size_t>(turn)];
    const TurnTimes& times = turn_times_[static_cast<size_t>(turn)];
    const int layer = step_.layer(turn);
    trace.push_back({Activity::kDense, layer, DenseBeganAt(turn, begin_s_), times.dense_ended_s});
    if (progress.cpu_reported.load() == 0) continue;
    trace.push_back({Activity::kCpuAttention, layer,
                     static_cast<double>(progress.first_start_ns.load()) * 1e-9,
                     static_cast<double>(progress.last_report_ns.load()) * 1e-9});
    trace.push_back({Activity::kAwaitCpu, layer, times.wait.began_s, times.wait.seen_s});
  }
  return trace;
}

void HybridAttention::CollectHandoff(const TurnProgress& progress, const TurnTimes& times,
                                     AttentionStats* stats) const {
  if (progress.cpu_reported.load() == 0) return;
  const double started_s = static_cast<double>(progress.first_start_ns.load()) * 1e-9;
  const double reported_s = static_cast<double>(progress.last_report_ns.load()) * 1e-9;
  stats->handoff_out_s.push_back(started_s - times.query_published_s);
  if (reported_s > times.wait.began_s) {
    stats->handoff_back_s.push_back(times.wait.seen_s - reported_s);
  }
}

void HybridAttention::CollectOverlap(AttentionStats* stats) const {
  const std::deque<CopyRecord>& copies = pump_->copies();
  size_t first_copy = 0;  // Copies and turns are both in order of time.
  double busy_until_s = 0;
  for (int turn = 0; turn < step_.num_turns; ++turn) {
    const TurnProgress& progress = turns_[static_cast<size_t>(turn)];
    // With two micro-batches the first workers begin while the last are at the turn before.
    const double start_s =
        std::max(static_cast<double>(progress.first_start_ns.load()) * 1e-9, busy_until_s);
    const double end_s = static_cast<double>(progress.last_report_ns.load()) * 1e-9;
    if (progress.cpu_reported.load() == 0 || end_s <= start_s) continue;
    busy_until_s = end_s;
    const double busy_s = end_s - start_s;
    stats->cpu_busy_s += busy_s;
    double overlap_s = 0;
    while (first_copy < copies.size() && copies[first_copy].end_s <= start_s) ++first_copy;
    for (size_t i = first_copy; i < copies.size() && copies[i].start_s < end_s; ++i) {
      const double both_s = std::min(end_s, copies[i].end_s) - std::max(start_s, copies[i].start_s);
      if (both_s <= 0) continue;
      overlap_s += both_s;
      stats->link_bytes_both_busy +=
          static_cast<int64_t>(static_cast<double>(copies[i].size_bytes) * both_s /
                               (copies[i].end_s - copies[i].start_s));
    }
    overlap_s = std::min(overlap_s, busy_s);
    stats->both_busy_s += overlap_s;
    stats->cpu_bytes_both_busy += static_cast<int64_t>(
        static_cast<double>(progress.cpu_reported.load() * options_.geometry.block_bytes()) *
        overlap_s / busy_s);
  }
}

}  // namespace writescope::attention
