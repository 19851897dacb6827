#include "tests/support/tiny_model.h"

#include <algorithm>

#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"
#include "engine/runtime/accelerator.h"
#include "tests/support/test_device.h"

namespace writescope::testing {

absl::StatusOr<std::unique_ptr<TinyModel>> TinyModel::Load(const TinyModelOptions& options) {
  auto tiny = std::make_unique<TinyModel>();
  ASSIGN_OR_RETURN(tiny->config, model::ReadModelConfig(options.dir));
  ASSIGN_OR_RETURN(model::ModelWeights weights,
                   options.dummy ? model::DummyWeights(tiny->config)
                                 : model::LoadWeights(options.dir, tiny->config));
  runtime::EngineOptions engine{.vram_budget_bytes = 4 * kGiB,
                                .device_threads = options.device_threads,
                                .link_bytes_per_s = options.link_bytes_per_s};
  UseTestDevice(engine);
  ASSIGN_OR_RETURN(tiny->device, runtime::CreateDevice(engine));
  const int max_tokens = std::max(options.prefill_chunk, options.max_sequences);
  ASSIGN_OR_RETURN(
      tiny->ops,
      runtime::CreateOps(*tiny->device, model::OpsLimitsOf(tiny->config, max_tokens), engine));
  ASSIGN_OR_RETURN(tiny->weights, model::DeviceWeights::Upload(tiny->config, weights, *tiny->ops,
                                                               options.experts));
  runtime::ModelRunner::Options runner;
  runner.kv_dtype = options.kv_dtype;
  runner.max_sequences = options.max_sequences;
  runner.prefill_chunk_tokens = options.prefill_chunk;
  runner.ring_bytes = options.ring_bytes;
  runner.num_workers = options.workers;
  runner.wait_limit = options.wait_limit;
  runner.max_recordings = options.max_recordings;
  runner.cache.blocks = options.blocks;
  runner.cache.prefix_cache = options.prefix_cache;
  // The CRCs are made and checked by the host, which cannot read a GPU's memory.
  runner.cache.verify = options.verify && !OnCuda();
  ASSIGN_OR_RETURN(tiny->runner,
                   runtime::ModelRunner::Create(tiny->config, *tiny->weights, *tiny->ops, runner));
  return tiny;
}

Driver::Driver(TinyModel& model, int64_t expected_blocks)
    : model_(model), slot_(model.runner->cache().AddSequence(expected_blocks)) {
  CHECK_GE(slot_, 0);
}

Driver::~Driver() {
  if (model_.runner->Ok()) model_.runner->cache().RemoveSequence(slot_);
}

absl::StatusOr<std::vector<std::vector<float>>> Driver::Feed(const std::vector<TokenId>& tokens,
                                                             int chunk, bool all_logits,
                                                             const attention::SharePlan& share) {
  std::vector<std::vector<float>> logits;
  for (size_t first = 0; first < tokens.size();) {
    const size_t count = std::min(static_cast<size_t>(chunk), tokens.size() - first);
    const bool last = first + count == tokens.size();
    const runtime::StepSlice slice{
        .slot = slot_,
        .tokens = std::span(tokens).subspan(first, count),
        .logits = all_logits ? runtime::LogitsOf::kAll
                             : (last ? runtime::LogitsOf::kLast : runtime::LogitsOf::kNone)};
    int full_slice = -1;
    ASSIGN_OR_RETURN(last_step_,
                     model_.runner->Run(
                         {&slice, 1}, {.share = count == 1 ? share : attention::SharePlan()},
                         [&](int, int64_t, const runtime::RowLogits& row) {
                           logits.emplace_back(row.all.begin(), row.all.end());
                         },
                         &full_slice));
    first += count;
  }
  return logits;
}

}  // namespace writescope::testing
