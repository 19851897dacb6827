#include "engine/runtime/model_runner.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"

namespace writescope::runtime {
namespace {

using kvcache::RegionKind;

// Staged steps: a resident one may run inside one with spilled KV.
constexpr int kResidentStep = 0;
constexpr int kSpilledStep = 1;
static_assert(kSpilledStep < ops::kStagedSteps);

// Prompt log-probabilities are computed this many rows at a time.
constexpr int kMinLogitRows = 32;

int MaxRows(const ModelRunner::Options& options) {
  return std::max(options.prefill_chunk_tokens, options.max_sequences);
}
int MaxLogitRows(const ModelRunner::Options& options) {
  return std::max(options.max_sequences, kMinLogitRows);
}

int64_t LogitsBytes(int rows, int vocab) { return int64_t{4} * rows * vocab; }
int64_t LargestBytes(int rows) { return rows * int64_t{sizeof(kernels::RowMax)}; }

kvcache::InplaceKvCache::Options CacheOptions(const model::ModelConfig& config,
                                              const ModelRunner::Options& options) {
  kvcache::InplaceKvCache::Options cache = options.cache;
  cache.geometry = model::GeometryOf(config, options.kv_dtype);
  cache.num_layers = config.num_layers;
  cache.max_sequences = options.max_sequences;
  cache.workspace_units = options.prefill_chunk_tokens / kBlockTokens;
  cache.wait_limit = options.wait_limit;
  return cache;
}

model::Decoder::Limits MainLimits(const ModelRunner::Options& options) {
  return {.max_rows = MaxRows(options),
          .max_logit_rows = MaxLogitRows(options),
          .staged_step = kSpilledStep};
}
model::Decoder::Limits ResidentLimits(const ModelRunner::Options& options) {
  return {.max_rows = options.max_sequences,
          .max_logit_rows = options.max_sequences,
          .staged_step = kResidentStep};
}

std::optional<StepShape> ShapeIf(bool has_shape, const StepShape& shape) {
  return has_shape ? std::optional(shape) : std::nullopt;
}

absl::Status GivenUp() { return absl::CancelledError("every request of the step was cancelled"); }

attention::CpuAttention::Options CpuOptions(const model::ModelConfig& config,
                                            const ModelRunner::Options& options) {
  return {.geometry = model::GeometryOf(config, options.kv_dtype),
          .num_layers = config.num_layers,
          .num_heads = config.num_heads,
          .max_rows = options.max_sequences,
          .num_workers = options.num_workers,
          .nap = options.nap};
}

}  // namespace

ModelRunner::FixedBytes ModelRunner::PlanBytes(const model::ModelConfig& config,
                                               int activation_bytes, const Options& options) {
  const KvGeometry geometry = model::GeometryOf(config, options.kv_dtype);
  // Each part is an allocation of its own, in whole pages.
  const auto pages = [](int64_t size_bytes) { return RoundUp(size_bytes, 4096); };
  const auto decoder_bytes = [&](const model::Decoder::Limits& limits) {
    return pages(model::Decoder::DeviceBytes(config, geometry, activation_bytes, limits));
  };
  const kvcache::InplaceKvCache::Options cache = CacheOptions(config, options);
  FixedBytes bytes;
  bytes.activations = decoder_bytes(MainLimits(options)) + decoder_bytes(ResidentLimits(options));
  bytes.tails_and_workspace = pages(kvcache::InplaceKvCache::TailBytes(cache)) +
                              pages(kvcache::InplaceKvCache::WorkspaceBytes(cache));
  bytes.handoff_host = attention::CpuAttention::HostBytes(CpuOptions(config, options));
  for (const int rows : {MaxLogitRows(options), options.max_sequences}) {
    bytes.logits_host += pages(LogitsBytes(rows, config.vocab_size)) + pages(LargestBytes(rows));
  }
  return bytes;
}

ModelRunner::ModelRunner(const model::ModelConfig& config, ops::Ops& ops, const Options& options)
    : config_(config), ops_(ops), options_(options), recordings_(ops, options.max_recordings) {}

ModelRunner::~ModelRunner() {
  // Threads that submit end with it; the queues wait for no other.
  attention_.reset();
  device::AwaitIdle({&ops_.device().compute(), &ops_.device().download()}, "model runner");
}

absl::StatusOr<std::unique_ptr<ModelRunner>> ModelRunner::Create(
    const model::ModelConfig& config, const model::DeviceWeights& weights, ops::Ops& ops,
    const Options& options) {
  const KvGeometry geometry = model::GeometryOf(config, options.kv_dtype);
  std::unique_ptr<ModelRunner> runner(new ModelRunner(config, ops, options));
  device::Device& device = ops.device();
  ASSIGN_OR_RETURN(runner->cache_,
                   kvcache::InplaceKvCache::Create(CacheOptions(config, options), device));
  ASSIGN_OR_RETURN(runner->attention_,
                   attention::HybridAttention::Create({.geometry = geometry,
                                                       .num_layers = config.num_layers,
                                                       .num_heads = config.num_heads,
                                                       .out_dim = model::AttentionOutDim(config),
                                                       .max_sequences = options.max_sequences,
                                                       .num_workers = options.num_workers,
                                                       .ring_bytes = options.ring_bytes,
                                                       .wait_limit = options.wait_limit,
                                                       .nap = options.nap},
                                                      ops, runner->cache_->blocks()));
  ASSIGN_OR_RETURN(runner->decoder_,
                   model::Decoder::Create(config, geometry, weights, ops, MainLimits(options)));
  ASSIGN_OR_RETURN(runner->resident_decoder_,
                   model::Decoder::Create(config, geometry, weights, ops, ResidentLimits(options)));
  ASSIGN_OR_RETURN(runner->logits_,
                   AllocateLogits(device, MaxLogitRows(options), config.vocab_size));
  ASSIGN_OR_RETURN(runner->resident_logits_,
                   AllocateLogits(device, options.max_sequences, config.vocab_size));
  return runner;
}

absl::StatusOr<ModelRunner::HostLogits> ModelRunner::AllocateLogits(device::Device& device,
                                                                    int rows, int vocab) {
  HostLogits logits;
  ASSIGN_OR_RETURN(logits.logits, device.AllocateHost(LogitsBytes(rows, vocab),
                                                      device::HostMemory::kPageLocked, "logits"));
  ASSIGN_OR_RETURN(
      logits.largest,
      device.AllocateHost(LargestBytes(rows), device::HostMemory::kPageLocked, "largest logits"));
  return logits;
}

bool ModelRunner::IsResident(int slot) const {
  for (const int id : cache_->SealedBlocks(slot)) {
    if (cache_->blocks().read_place(id).region != RegionKind::kDevice) return false;
  }
  return true;
}

StepBytes ModelRunner::BytesOf(std::span<const int> slots) const {
  const int64_t unit_bytes = cache_->blocks().geometry().block_bytes() * config_.num_layers;
  std::vector<bool> seen;  // By id
  StepBytes bytes;
  for (const int slot : slots) {
    for (const int id : cache_->SealedBlocks(slot)) {
      const size_t at = static_cast<size_t>(id);
      if (at >= seen.size()) seen.resize(2 * at + 1);
      if (seen[at]) continue;
      seen[at] = true;
      const RegionKind region = cache_->blocks().read_place(id).region;
      (region == RegionKind::kDevice ? bytes.resident : bytes.spilled) += unit_bytes;
      if (region == RegionKind::kStream) bytes.stream += unit_bytes;
      if (region == RegionKind::kHost) bytes.host += unit_bytes;
    }
  }
  return bytes;
}

absl::StatusOr<double> ModelRunner::MeasureDense(int batch_size) {
  std::vector<int> slots;
  std::vector<TokenId> tokens;
  for (int i = 0; i < batch_size; ++i) {
    slots.push_back(cache_->AddSequence(1));
    CHECK_GE(slots.back(), 0);
    // Each its own token: a router sends equal ones to the same experts.
    tokens.push_back(static_cast<TokenId>(int64_t{7919} * (i + 1) % config_.vocab_size));
  }
  std::vector<StepSlice> slices;
  for (size_t i = 0; i < slots.size(); ++i) {
    slices.push_back(
        {.slot = slots[i], .tokens = std::span(tokens).subspan(i, 1), .only_largest = true});
  }
  int full_slice = -1;
  const double began_s = device::NowSeconds();
  const absl::Status status = RunResident(
      slices, [](int, int64_t, const RowLogits&) {}, &full_slice, /*may_replay=*/false);
  const double seconds = device::NowSeconds() - began_s;
  for (const int slot : slots) cache_->RemoveSequence(slot);
  RETURN_IF_ERROR(status);
  return seconds;
}

absl::Status ModelRunner::Prepare(std::span<const StepSlice> slices, int64_t retain_keep_free,
                                  Step* step, int* full_slice) {
  int workspace_used = 0;
  for (size_t i = 0; i < slices.size(); ++i) {
    const StepSlice& slice = slices[i];
    absl::Status status = cache_->PollCommits(slice.slot, /*wait=*/false);
    if (status.ok()) {
      absl::StatusOr<kvcache::WritePlan> plan =
          cache_->PrepareWrite(slice.slot, static_cast<int>(slice.tokens.size()), &workspace_used);
      status = plan.status();
      if (plan.ok()) step->plans.push_back(*std::move(plan));
    }
    if (!status.ok()) {
      *full_slice = static_cast<int>(i);
      Abandon(*step);
      return status;
    }
  }
  std::vector<attention::StepSequence> sequences;
  for (size_t i = 0; i < slices.size(); ++i) {
    const StepSlice& slice = slices[i];
    const int first_row = static_cast<int>(step->tokens.size());
    sequences.push_back({.plan = &step->plans[i], .first_row = first_row});
    step->tokens.insert(step->tokens.end(), slice.tokens.begin(), slice.tokens.end());
    const int num_tokens = static_cast<int>(slice.tokens.size());
    for (int t = 0; t < num_tokens; ++t) {
      step->positions.push_back(step->plans[i].first_position + t);
      if (slice.logits == LogitsOf::kNone) continue;
      if (slice.logits == LogitsOf::kLast && t + 1 < num_tokens) continue;
      step->logit_rows.push_back(first_row + t);
      step->logit_slices.push_back(static_cast<int>(i));
      step->only_largest.push_back(slice.only_largest);
    }
  }
  step->attention =
      attention::BuildStepAttention(*cache_, sequences, retain_keep_free, &step->retained);
  step->targets.resize(step->tokens.size());
  absl::Status intact = VerifyBlocks(*step, full_slice);
  if (!intact.ok()) Abandon(*step);
  return intact;
}

absl::Status ModelRunner::VerifyBlocks(const Step& step, int* bad_slice) const {
  if (!options_.cache.verify) return absl::OkStatus();
  for (size_t i = 0; i < step.plans.size(); ++i) {
    *bad_slice = static_cast<int>(i);
    for (const int id : cache_->SealedBlocks(step.plans[i].slot)) {
      if (cache_->blocks().sealed(id)) RETURN_IF_ERROR(cache_->blocks().Verify(id));
    }
  }
  *bad_slice = -1;
  return absl::OkStatus();
}

void ModelRunner::FillTargets(Step& step, int layer) const {
  size_t row = 0;
  for (const kvcache::WritePlan& plan : step.plans) {
    for (const kvcache::UnitWrite& write : plan.units) {
      std::byte* block = write.target.At(layer);
      for (int slot = 0; slot < write.num_slots; ++slot) {
        step.targets[row++] = {.block = block, .slot = write.first_slot + slot};
      }
    }
  }
}

absl::Status ModelRunner::AttendLayer(const Step& step, int layer, const StepOptions& options) {
  for (const kvcache::WritePlan& plan : step.plans) cache_->CommitLayer(plan, layer);
  return attention_->AttendLayer(layer, decoder_->q(), decoder_->state(), decoder_->attention_out(),
                                 options.between);
}

absl::Status ModelRunner::RunLayers(Step& step, int64_t num_logits, const StepOptions& options) {
  decoder_->Embed(step.tokens);
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    if (options.cancelled && options.cancelled()) return GivenUp();
    FillTargets(step, layer);
    cache_->AwaitWorkspace(layer);
    decoder_->BeforeAttention(layer, step.positions, step.targets);
    RETURN_IF_ERROR(AttendLayer(step, layer, options));
    decoder_->AfterAttention(layer);
  }
  if (num_logits > 0) {
    decoder_->Logits(std::span(step.logit_rows).first(static_cast<size_t>(num_logits)),
                     logits_.largest_of_rows());
  }
  return absl::OkStatus();
}

absl::Status ModelRunner::RunDecodeLayers(Step& step, const StepOptions& options) {
  const int num_layers = config_.num_layers;
  const int num_rows = static_cast<int>(step.tokens.size());
  // Attention takes what it finds on the device call by call: nothing of it is staged.
  const bool can_replay = Stage(kSpilledStep, step, {}) && !decoder_->has_choice_hook();
  StepRecordings::Step recorded =
      recordings_.Begin(ShapeIf(can_replay, {.spilled = true, .rows = num_rows}), num_layers + 1);
  // Attention and what waits for the CPU depends on the step; all that lies between is the same.
  for (int layer = 0; layer <= num_layers; ++layer) {
    if (options.cancelled && layer < num_layers && options.cancelled()) return GivenUp();
    recorded.Submit([&] {
      if (layer == 0) {
        decoder_->EmbedStaged(num_rows);
      } else {
        decoder_->AfterAttention(layer - 1);
      }
      if (layer < num_layers) {
        decoder_->BeforeStagedAttention(layer);
      } else {
        decoder_->AllLogits(logits_.largest_of_rows());
      }
    });
    if (layer < num_layers) RETURN_IF_ERROR(AttendLayer(step, layer, options));
  }
  return absl::OkStatus();
}

bool ModelRunner::IsDecode(const Step& step) const {
  return step.tokens.size() == step.plans.size() && step.logit_rows.size() == step.tokens.size() &&
         static_cast<int>(step.tokens.size()) <= options_.max_sequences;
}

absl::StatusOr<StepResult> ModelRunner::Run(std::span<const StepSlice> slices,
                                            const StepOptions& options, const LogitsSink& sink,
                                            int* full_slice) {
  Step step;
  absl::Status status = Prepare(slices, options.retain_keep_free, &step, full_slice);
  RETURN_IF_ERROR(status);
  cache_->mutable_blocks().LockRetained(true);
  attention_->BeginStep(step.attention, options.share);
  const int64_t num_logits = static_cast<int64_t>(step.logit_rows.size());
  const int64_t first_batch = std::min<int64_t>(num_logits, decoder_->max_logit_rows());
  status = IsDecode(step) ? RunDecodeLayers(step, options) : RunLayers(step, first_batch, options);
  absl::StatusOr<attention::AttentionStats> stats = attention::AttentionStats();
  if (status.ok()) {
    DownloadLogits(step, 0, first_batch, *decoder_, logits_);
    stats = attention_->EndStep(ops_.device().compute().Record());
  } else {
    attention_->CancelStep();
    stats = status;
  }
  cache_->mutable_blocks().LockRetained(false);
  if (!stats.ok()) {
    if (Ok()) Abandon(step);
    return stats.status();
  }
  Finish(slices, step);
  EmitLogits(step, 0, first_batch, logits_, sink);
  for (int64_t first = first_batch; first < num_logits; first += decoder_->max_logit_rows()) {
    const int64_t count = std::min<int64_t>(decoder_->max_logit_rows(), num_logits - first);
    decoder_->Logits(
        std::span(step.logit_rows).subspan(static_cast<size_t>(first), static_cast<size_t>(count)),
        logits_.largest_of_rows());
    DownloadLogits(step, first, count, *decoder_, logits_);
    RETURN_IF_ERROR(ops_.device().compute().Record().Wait(absl::InfiniteDuration()));
    EmitLogits(step, first, count, logits_, sink);
  }
  StepResult result;
  result.attention = *stats;
  result.slices = Attribute(step, stats->mean_cut_blocks, options.share.handoff);
  return result;
}

bool ModelRunner::Stage(int staged_step, const Step& step,
                        const attention::HybridAttention::DeviceSpans& spans) {
  std::vector<ops::KvTarget> targets;
  for (const kvcache::WritePlan& plan : step.plans) {
    for (const kvcache::UnitWrite& write : plan.units) {
      // A token goes to its sequence's tail, which has room for every layer.
      CHECK_GE(write.target.period, config_.num_layers);
      for (int slot = 0; slot < write.num_slots; ++slot) {
        targets.push_back({.block = write.target.At(0),
                           .slot = write.first_slot + slot,
                           .layer_stride_bytes = write.target.stride_bytes});
      }
    }
  }
  for (const attention::StepAttention::Open& open : step.attention.open) {
    CHECK_GE(open.span.address.period, config_.num_layers);
  }
  return ops_.StageStep({.step = staged_step,
                         .kv = cache_->blocks().geometry(),
                         .num_heads = config_.num_heads,
                         .tokens = step.tokens,
                         .positions = step.positions,
                         .targets = targets,
                         .spans = spans.spans,
                         .readers = spans.readers,
                         .rows = step.attention.rows});
}

absl::Status ModelRunner::RunResident(std::span<const StepSlice> slices, const LogitsSink& sink,
                                      int* full_slice, bool may_replay) {
  Step step;
  RETURN_IF_ERROR(Prepare(slices, /*retain_keep_free=*/-1, &step, full_slice));
  if (step.attention.runs.spilled_blocks() > 0) {
    Abandon(step);
    return absl::InternalError("a resident step over spilled blocks");
  }
  const int num_rows = static_cast<int>(step.tokens.size());
  const bool all_logits = step.logit_rows.size() == step.tokens.size();
  kernels::RowMax* largest = resident_logits_.largest_of_rows();
  const bool is_same =
      Stage(kResidentStep, step, attention_->SpansOnDevice(step.attention, /*layer=*/0));
  const bool can_replay =
      is_same && all_logits && may_replay && !resident_decoder_->has_choice_hook();
  recordings_.Begin(ShapeIf(can_replay, {.rows = num_rows}), /*num_parts=*/1).Submit([&] {
    resident_decoder_->EmbedStaged(num_rows);
    for (int layer = 0; layer < config_.num_layers; ++layer) resident_decoder_->StagedLayer(layer);
    if (all_logits) resident_decoder_->AllLogits(largest);
  });
  const int64_t num_logits = static_cast<int64_t>(step.logit_rows.size());
  if (!all_logits && num_logits > 0) resident_decoder_->Logits(step.logit_rows, largest);
  DownloadLogits(step, 0, num_logits, *resident_decoder_, resident_logits_);
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    for (const kvcache::WritePlan& plan : step.plans) cache_->CommitLayer(plan, layer);
  }
  RETURN_IF_ERROR(ops_.device().compute().Record().Wait(absl::InfiniteDuration()));
  Finish(slices, step);
  EmitLogits(step, 0, num_logits, resident_logits_, sink);
  return absl::OkStatus();
}

void ModelRunner::Finish(std::span<const StepSlice> slices, Step& step) {
  for (size_t i = 0; i < slices.size(); ++i) {
    cache_->FinishWrite(step.plans[i], slices[i].tokens);
  }
  for (const int id : step.retained) cache_->mutable_blocks().FinishRetain(id, /*landed=*/true);
}

void ModelRunner::Abandon(Step& step) {
  for (auto plan = step.plans.rbegin(); plan != step.plans.rend(); ++plan) {
    cache_->AbandonWrite(*plan);
  }
  for (const int id : step.retained) cache_->mutable_blocks().FinishRetain(id, /*landed=*/false);
  step.plans.clear();
  step.retained.clear();
}

void ModelRunner::DownloadLogits(const Step& step, int64_t first, int64_t count,
                                 model::Decoder& decoder, const HostLogits& logits) const {
  const auto whole = [&](int64_t i) { return !step.only_largest[static_cast<size_t>(first + i)]; };
  for (int64_t i = 0; i < count;) {
    int64_t end = i;
    while (end < count && whole(end)) ++end;
    if (end > i) decoder.DownloadLogits(i, end - i, logits.row(i, config_.vocab_size));
    i = std::max(end, i + 1);
  }
}

void ModelRunner::EmitLogits(const Step& step, int64_t first, int64_t count,
                             const HostLogits& logits, const LogitsSink& sink) const {
  for (int64_t i = 0; i < count; ++i) {
    const size_t at = static_cast<size_t>(first + i);
    RowLogits row = {.largest = logits.largest_of_rows()[i]};
    if (!step.only_largest[at]) {
      row.all = {logits.row(i, config_.vocab_size), static_cast<size_t>(config_.vocab_size)};
    }
    sink(step.logit_slices[at], step.positions[static_cast<size_t>(step.logit_rows[at])], row);
  }
}

std::vector<SliceAttention> ModelRunner::Attribute(const Step& step, double cut_blocks,
                                                   bool handoff) const {
  std::vector<SliceAttention> slices(step.plans.size());
  const attention::RunList& runs = step.attention.runs;
  const auto add = [&](const attention::Run& run, double blocks, int64_t SliceAttention::*field) {
    const int64_t tokens = std::llround(blocks * kBlockTokens);
    for (int i = 0; i < run.num_readers; ++i) {
      const int reader =
          runs.readers[static_cast<size_t>(run.first_reader) + static_cast<size_t>(i)];
      slices[static_cast<size_t>(reader)].*field += tokens;
    }
  };
  for (const attention::Run& run : runs.device) {
    add(run, run.num_blocks, &SliceAttention::resident_tokens);
  }
  for (const attention::Run& run : runs.stream.runs()) {
    add(run, run.num_blocks, &SliceAttention::streamed_tokens);
  }
  for (const attention::Run& run : runs.host.runs()) {
    add(run, run.num_blocks,
        handoff ? &SliceAttention::cpu_tokens : &SliceAttention::streamed_tokens);
  }
  double start = 0;
  for (const attention::Run& run : runs.swing.runs()) {
    const double front = std::clamp(cut_blocks - start, 0.0, static_cast<double>(run.num_blocks));
    add(run, front, &SliceAttention::streamed_tokens);
    add(run, run.num_blocks - front, &SliceAttention::cpu_tokens);
    start += run.num_blocks;
  }
  for (const attention::StepAttention::Open& open : step.attention.open) {
    slices[static_cast<size_t>(open.reader)].resident_tokens += open.span.num_tokens;
  }
  return slices;
}

}  // namespace writescope::runtime
