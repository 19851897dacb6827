#include "engine/runtime/model_runner.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"

namespace writescope::runtime {
namespace {

using kvcache::RegionKind;

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
          .staged_step = ModelRunner::kSpilledStep};
}
model::Decoder::Limits ResidentLimits(const ModelRunner::Options& options) {
  return {.max_rows = options.max_sequences,
          .max_logit_rows = options.max_sequences,
          .staged_step = ModelRunner::kResidentStep};
}

attention::CpuAttention::Options CpuOptions(const model::ModelConfig& config,
                                            const ModelRunner::Options& options) {
  return {.geometry = model::GeometryOf(config, options.kv_dtype),
          .max_turns = attention::kMaxMicroBatches * config.num_layers,
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

absl::Status ModelRunner::Prepare(std::span<const StepSlice> slices, MicroBatches micro_batches,
                                  const StepOptions& options, Step* step, int* full_slice) {
  int workspace_used = 0;
  for (size_t i = 0; i < slices.size(); ++i) {
    const StepSlice& slice = slices[i];
    cache_->NoteCommits(slice.slot);
    absl::StatusOr<kvcache::WritePlan> plan =
        cache_->PrepareWrite(slice.slot, static_cast<int>(slice.tokens.size()), &workspace_used);
    if (!plan.ok()) {
      *full_slice = static_cast<int>(i);
      Abandon(*step);
      return plan.status();
    }
    step->plans.push_back(*std::move(plan));
  }
  for (std::vector<int>& part : micro_batches) {
    std::vector<attention::StepSequence> sequences;
    for (const int i : part) {
      const size_t at = static_cast<size_t>(i);
      sequences.push_back(
          {.plan = &step->plans[at], .first_row = static_cast<int>(step->tokens.size())});
      AddRows(slices[at], i, step);
    }
    step->parts.push_back({.slices = std::move(part),
                           .attention = attention::BuildStepAttention(
                               *cache_, sequences, attention::OrderFor(options.share),
                               options.retain_keep_free, &step->retained)});
  }
  absl::Status intact = VerifyBlocks(*step, full_slice);
  if (!intact.ok()) Abandon(*step);
  return intact;
}

void ModelRunner::AddRows(const StepSlice& slice, int index, Step* step) {
  const int first_row = static_cast<int>(step->tokens.size());
  const int num_tokens = static_cast<int>(slice.tokens.size());
  step->tokens.insert(step->tokens.end(), slice.tokens.begin(), slice.tokens.end());
  for (int t = 0; t < num_tokens; ++t) {
    step->positions.push_back(step->plans[static_cast<size_t>(index)].first_position + t);
    if (slice.logits == LogitsOf::kNone) continue;
    if (slice.logits == LogitsOf::kLast && t + 1 < num_tokens) continue;
    step->logit_rows.push_back(first_row + t);
    step->logit_slices.push_back(index);
    step->only_largest.push_back(slice.only_largest);
  }
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

bool ModelRunner::IsDecode(std::span<const StepSlice> slices) const {
  return static_cast<int>(slices.size()) <= options_.max_sequences &&
         std::all_of(slices.begin(), slices.end(), [](const StepSlice& slice) {
           return slice.tokens.size() == 1 && slice.logits != LogitsOf::kNone;
         });
}

MicroBatches ModelRunner::InOne(size_t num_slices) {
  MicroBatches one(1);
  for (size_t i = 0; i < num_slices; ++i) one[0].push_back(static_cast<int>(i));
  return one;
}

MicroBatches ModelRunner::SplitInTwo(std::span<const int> slots) const {
  std::vector<SequenceLoad> sequences;
  for (const int slot : slots) {
    const std::span<const int> blocks = cache_->SealedBlocks(slot);
    sequences.push_back({.spilled_bytes = SpilledBytes({&slot, 1}),
                         .first_block = blocks.empty() ? -1 : blocks.front()});
  }
  return runtime::SplitInTwo(sequences);
}

absl::StatusOr<StepResult> ModelRunner::Run(std::span<const StepSlice> slices,
                                            const StepOptions& options, const LogitsSink& sink,
                                            int* full_slice) {
  Step step;
  const bool is_decode = IsDecode(slices);
  const bool in_parts = is_decode && !options.micro_batches.empty();
  absl::Status status = Prepare(slices, in_parts ? options.micro_batches : InOne(slices.size()),
                                options, &step, full_slice);
  RETURN_IF_ERROR(status);
  cache_->mutable_blocks().LockRetained(true);
  std::vector<attention::StepAttention> parts;
  for (const MicroBatch& part : step.parts) parts.push_back(part.attention);
  attention_->BeginStep(std::move(parts), options.share);
  const int64_t num_logits = static_cast<int64_t>(step.logit_rows.size());
  const int64_t first_batch = std::min<int64_t>(num_logits, decoder_->max_logit_rows());
  status = is_decode ? RunDecodeLayers(step, options) : RunLayers(step, first_batch, options);
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
  result.micro_batches = static_cast<int>(step.parts.size());
  result.slices.resize(slices.size());
  for (size_t i = 0; i < step.parts.size(); ++i) {
    Attribute(step.parts[i], stats->mean_cut_blocks[i], options.share.handoff, &result.slices);
  }
  return result;
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

void ModelRunner::Attribute(const MicroBatch& part, double cut_blocks, bool handoff,
                            std::vector<SliceAttention>* slices) {
  const attention::RunList& runs = part.attention.runs;
  const auto slice_of = [&](int reader) -> SliceAttention& {
    return (*slices)[static_cast<size_t>(part.slices[static_cast<size_t>(reader)])];
  };
  const auto add = [&](const attention::Run& run, double blocks, int64_t SliceAttention::*field) {
    const int64_t tokens = std::llround(blocks * kBlockTokens);
    for (int i = 0; i < run.num_readers; ++i) {
      const int reader =
          runs.readers[static_cast<size_t>(run.first_reader) + static_cast<size_t>(i)];
      slice_of(reader).*field += tokens;
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
  for (const attention::StepAttention::Open& open : part.attention.open) {
    slice_of(open.reader).resident_tokens += open.span.num_tokens;
  }
}

}  // namespace writescope::runtime
