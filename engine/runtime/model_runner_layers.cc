// How ModelRunner submits a step's layers: prompts, decode steps over spilled KV, whose dense work
// goes as recorded where it can, and decode steps of resident sequences.
#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/runtime/model_runner.h"

namespace writescope::runtime {
namespace {

std::optional<StepShape> ShapeIf(bool has_shape, const StepShape& shape) {
  return has_shape ? std::optional(shape) : std::nullopt;
}

absl::Status GivenUp() { return absl::CancelledError("every request of the step was cancelled"); }

}  // namespace

void ModelRunner::FillTargets(Step& step, int layer) const {
  size_t row = 0;
  step.targets.resize(step.tokens.size());
  for (const kvcache::WritePlan& plan : step.plans) {
    for (const kvcache::UnitWrite& write : plan.units) {
      std::byte* block = write.target.At(layer);
      for (int slot = 0; slot < write.num_slots; ++slot) {
        step.targets[row++] = {.block = block, .slot = write.first_slot + slot};
      }
    }
  }
}

void ModelRunner::BeginTurn(const Step& step, int turn) {
  const int num_parts = static_cast<int>(step.parts.size());
  const MicroBatch& part = step.parts[static_cast<size_t>(turn % num_parts)];
  for (const int slice : part.slices) {
    cache_->CommitLayer(step.plans[static_cast<size_t>(slice)], turn / num_parts);
  }
  attention_->BeginTurn(turn, decoder_->q(), decoder_->state());
}

absl::Status ModelRunner::EndTurn(int turn, const StepOptions& options) {
  return attention_->EndTurn(turn, decoder_->q(), decoder_->state(), decoder_->attention_out(),
                             options.between);
}

absl::Status ModelRunner::RunLayers(Step& step, int64_t num_logits, const StepOptions& options) {
  int least_rows = std::numeric_limits<int>::max();
  for (const kvcache::WritePlan& plan : step.plans) {
    least_rows = std::min(least_rows, plan.num_tokens);
  }
  decoder_->SetLatentHeads(!options.share.handoff && least_rows >= decoder_->LatentHeadsMinRows());
  decoder_->Embed(step.tokens);
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    if (options.cancelled && options.cancelled()) return GivenUp();
    FillTargets(step, layer);
    cache_->AwaitWorkspace(layer);
    decoder_->BeforeAttention(layer, step.positions, step.targets);
    BeginTurn(step, layer);
    RETURN_IF_ERROR(EndTurn(layer, options));
    decoder_->AfterAttention(layer);
  }
  if (num_logits > 0) {
    decoder_->Logits(std::span(step.logit_rows).first(static_cast<size_t>(num_logits)),
                     logits_.largest_of_rows());
  }
  return absl::OkStatus();
}

absl::Status ModelRunner::RunDecodeLayers(Step& step, const StepOptions& options) {
  const int num_rows = static_cast<int>(step.tokens.size());
  const int num_parts = static_cast<int>(step.parts.size());
  const int num_turns = config_.num_layers * num_parts;
  // Attention takes what it finds on the device call by call: nothing of it is staged.
  const bool can_replay = Stage(kSpilledStep, step, {}) && !decoder_->has_choice_hook();
  decoder_->SetLatentHeads(false);
  decoder_->StartStep(num_rows);
  StepRecordings::Step recorded = recordings_.Begin(
      ShapeIf(
          can_replay,
          {.spilled = true, .rows = num_rows, .first_rows = step.parts.front().attention.num_rows}),
      num_turns + num_parts);
  // Attention and what waits for the CPU depends on the step; all that lies between is the same. A
  // part's turn ends after the other's has begun: meanwhile the CPU has a query.
  for (int turn = 0; turn < num_turns + num_parts; ++turn) {
    const MicroBatch& part = step.parts[static_cast<size_t>(turn % num_parts)];
    const int layer = turn / num_parts;
    decoder_->SelectRows(part.attention.first_row, part.attention.num_rows);
    if (layer > 0) RETURN_IF_ERROR(EndTurn(turn - num_parts, options));
    if (options.cancelled && layer < config_.num_layers && options.cancelled()) return GivenUp();
    recorded.Submit([&] {
      if (turn == 0) decoder_->EmbedStaged();
      if (layer > 0) decoder_->AfterAttention(layer - 1);
      if (layer < config_.num_layers) decoder_->BeforeStagedAttention(layer);
      if (turn + 1 == num_turns + num_parts) decoder_->AllLogits(logits_.largest_of_rows());
    });
    if (layer < config_.num_layers) BeginTurn(step, turn);
  }
  return absl::OkStatus();
}

bool ModelRunner::Stage(int staged_step, const Step& step,
                        const attention::HybridAttention::DeviceSpans& spans) {
  // Attention that is staged is that of the whole batch.
  const std::span<const ops::ReaderRows> rows = step.parts.front().attention.rows;
  CHECK(spans.spans.empty() || step.parts.size() == 1);
  std::vector<ops::KvTarget> targets;
  for (const MicroBatch& part : step.parts) {
    for (const int slice : part.slices) {
      for (const kvcache::UnitWrite& write : step.plans[static_cast<size_t>(slice)].units) {
        // A token goes to its sequence's tail, which has room for every layer.
        CHECK_GE(write.target.period, config_.num_layers);
        for (int slot = 0; slot < write.num_slots; ++slot) {
          targets.push_back({.block = write.target.At(0),
                             .slot = write.first_slot + slot,
                             .layer_stride_bytes = write.target.stride_bytes});
        }
      }
    }
    for (const attention::StepAttention::Open& open : part.attention.open) {
      CHECK_GE(open.span.address.period, config_.num_layers);
    }
  }
  return ops_.StageStep({.step = staged_step,
                         .kv = cache_->blocks().geometry(),
                         .num_heads = config_.num_heads,
                         .tokens = step.tokens,
                         .positions = step.positions,
                         .targets = targets,
                         .spans = spans.spans,
                         .readers = spans.readers,
                         .rows = rows});
}

absl::Status ModelRunner::RunResident(std::span<const StepSlice> slices, const LogitsSink& sink,
                                      int* full_slice, bool may_replay) {
  Step step;
  StepOptions options;
  options.retain_keep_free = -1;
  RETURN_IF_ERROR(Prepare(slices, InOne(slices.size()), options, &step, full_slice));
  const MicroBatch& batch = step.parts.front();
  if (batch.attention.runs.spilled_blocks() > 0) {
    Abandon(step);
    return absl::AbortedError("a block that is kept on the device gave way to one of this step");
  }
  const int num_rows = static_cast<int>(step.tokens.size());
  const bool all_logits = step.logit_rows.size() == step.tokens.size();
  kernels::RowMax* largest = resident_logits_.largest_of_rows();
  const bool is_same =
      Stage(kResidentStep, step, attention_->SpansOnDevice(batch.attention, /*layer=*/0));
  const bool can_replay =
      is_same && all_logits && may_replay && !resident_decoder_->has_choice_hook();
  resident_decoder_->StartStep(num_rows);
  recordings_.Begin(ShapeIf(can_replay, {.rows = num_rows}), /*num_parts=*/1).Submit([&] {
    resident_decoder_->EmbedStaged();
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

}  // namespace writescope::runtime
