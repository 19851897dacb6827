// Runs one step of the batch: writes, attention over all regions, logits. It knows sequences by
// their slot in the cache and nothing of requests.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/attention/hybrid_attention.h"
#include "engine/device/device.h"
#include "engine/kernels/elementwise.h"
#include "engine/kvcache/inplace_kv_cache.h"
#include "engine/model/config.h"
#include "engine/model/decoder.h"
#include "engine/ops/ops.h"
#include "engine/runtime/micro_batches.h"
#include "engine/runtime/step_recordings.h"
#include "engine/runtime/step_stats.h"

namespace writescope::runtime {

enum class LogitsOf { kNone, kLast, kAll };

// A sequence's part of a step: its next tokens.
struct StepSlice {
  int slot = 0;
  std::span<const TokenId> tokens;
  LogitsOf logits = LogitsOf::kLast;
  bool only_largest = false;  // Of its logits the host needs no others.
};

struct StepOptions {
  attention::SharePlan share;
  // Device blocks to leave free when copies of streamed blocks are kept; below 0 keeps none.
  int64_t retain_keep_free = -1;
  // The slices by micro-batch, for a step of which each sequence has one token and logits; none:
  // all in one.
  MicroBatches micro_batches;
  // Looked at between layers: true gives the step up with CANCELLED.
  std::function<bool()> cancelled;
  // Called while a hybrid step waits for the link or the CPU, with whether it still does.
  attention::HybridAttention::Between between;
};

// What a step says of one row.
struct RowLogits {
  kernels::RowMax largest;
  std::span<const float> all;  // [vocab]; empty where the slice wants only the largest
};

// Called for each row that has logits, which are valid during the call.
using LogitsSink = std::function<void(int slice, int64_t position, const RowLogits& logits)>;

// Attention of one slice, in key positions, mean over layers.
struct SliceAttention {
  int64_t resident_tokens = 0;
  int64_t streamed_tokens = 0;
  int64_t cpu_tokens = 0;
};

struct StepResult {
  attention::AttentionStats attention;
  int micro_batches = 1;
  std::vector<SliceAttention> slices;
};

// Engine thread.
class ModelRunner {
 public:
  // Staged steps: a resident one may run inside one with spilled KV.
  static constexpr int kResidentStep = 0;
  static constexpr int kSpilledStep = 1;
  static_assert(kSpilledStep < ops::kStagedSteps);

  struct Options {
    KvDtype kv_dtype = KvDtype::kBf16;
    int max_sequences = 1;
    int prefill_chunk_tokens = 512;
    int64_t ring_bytes = 0;
    int num_workers = 1;
    absl::Duration wait_limit = absl::Seconds(2);
    absl::Duration nap = absl::Microseconds(20);
    int max_recordings = 0;                  // By cost, where the device keeps calls
    kvcache::InplaceKvCache::Options cache;  // geometry, num_layers, max_sequences are filled in
  };
  // Sizes of what Create allocates besides weights and regions; device bytes and host bytes.
  struct FixedBytes {
    int64_t activations = 0;
    int64_t tails_and_workspace = 0;
    int64_t handoff_host = 0;
    int64_t logits_host = 0;  // And the largest of each row
  };
  static FixedBytes PlanBytes(const model::ModelConfig& config, int activation_bytes,
                              const Options& options);
  // `config`, `weights` and `ops` must outlive the runner.
  static absl::StatusOr<std::unique_ptr<ModelRunner>> Create(const model::ModelConfig& config,
                                                             const model::DeviceWeights& weights,
                                                             ops::Ops& ops, const Options& options);
  // Waits for what a failed step has left on the queues: it uses the memory here.
  ~ModelRunner();

  kvcache::InplaceKvCache& cache() { return *cache_; }
  const kvcache::InplaceKvCache& cache() const { return *cache_; }
  attention::HybridAttention& attention() { return *attention_; }
  model::Decoder& decoder() { return *decoder_; }
  int vocab_size() const { return config_.vocab_size; }
  // What a step over these slots would read of sealed blocks.
  StepBytes BytesOf(std::span<const int> slots) const;
  int64_t SpilledBytes(std::span<const int> slots) const { return BytesOf(slots).spilled; }
  bool IsResident(int slot) const;
  // For StepOptions::micro_batches, of slices in the order of the slots.
  MicroBatches SplitInTwo(std::span<const int> slots) const;

  // One forward pass. RESOURCE_EXHAUSTED: no KV block for slice `*full_slice`, and nothing has
  // changed; CANCELLED: given up; DATA_LOSS: a sealed block of `*full_slice` changed; others: the
  // step failed. On any error the sequences are as before.
  absl::StatusOr<StepResult> Run(std::span<const StepSlice> slices, const StepOptions& options,
                                 const LogitsSink& sink, int* full_slice);
  // The same for sequences whose blocks are all on the device, one token each; may be called from
  // StepOptions::between. With `may_replay` a recording is used or made. ABORTED: a copy that was
  // kept of a spilled block has given its room to a block of this step; who has lost it steps by
  // Run.
  absl::Status RunResident(std::span<const StepSlice> slices, const LogitsSink& sink,
                           int* full_slice, bool may_replay = true);
  const RecordingCounts& recording_counts() const { return recordings_.counts(); }
  // Seconds of a step of this many sequences that have no KV yet: D, nearly. Before any is open.
  // Submitted call by call: nothing has been recorded so early.
  absl::StatusOr<double> MeasureDense(int batch_size);
  // False: a thread of a failed step did not come back; the engine cannot go on.
  bool Ok() const { return attention_->Ok(); }

 private:
  struct MicroBatch {
    std::vector<int> slices;
    attention::StepAttention attention;
  };
  struct Step {
    std::vector<kvcache::WritePlan> plans;  // By slice
    std::vector<MicroBatch> parts;          // Their slices' rows come in this order
    std::vector<TokenId> tokens;            // By row
    std::vector<int64_t> positions;
    std::vector<ops::KvTarget> targets;
    std::vector<int> retained;
    std::vector<int> logit_rows;
    std::vector<int> logit_slices;
    std::vector<bool> only_largest;  // By logit row
  };
  // Where a decoder's logits come to on the host, for as many rows as it has logits for.
  struct HostLogits {
    device::Buffer logits;   // Page-locked [rows, vocab]
    device::Buffer largest;  // Page-locked kernels::RowMax [rows]
    float* row(int64_t i, int vocab) const {
      return reinterpret_cast<float*>(logits.data()) + i * vocab;
    }
    kernels::RowMax* largest_of_rows() const {
      return reinterpret_cast<kernels::RowMax*>(largest.data());
    }
  };
  ModelRunner(const model::ModelConfig& config, ops::Ops& ops, const Options& options);
  absl::Status Prepare(std::span<const StepSlice> slices, MicroBatches micro_batches,
                       const StepOptions& options, Step* step, int* full_slice);
  static void AddRows(const StepSlice& slice, int index, Step* step);
  static MicroBatches InOne(size_t num_slices);
  absl::Status VerifyBlocks(const Step& step, int* bad_slice) const;
  void FillTargets(Step& step, int layer) const;
  // Submits the step up to its logits, of which the first `num_logits` are made.
  absl::Status RunLayers(Step& step, int64_t num_logits, const StepOptions& options);
  // The same for a decode step, as recorded where it can be.
  absl::Status RunDecodeLayers(Step& step, const StepOptions& options);
  // Of the decoder's selected rows, whose keys and values of the layer have been submitted.
  void BeginTurn(const Step& step, int turn);
  absl::Status EndTurn(int turn, const StepOptions& options);
  // One token for each sequence, each with logits.
  bool IsDecode(std::span<const StepSlice> slices) const;
  // What Ops::StageStep returns for the step.
  bool Stage(int staged_step, const Step& step,
             const attention::HybridAttention::DeviceSpans& spans);
  void Finish(std::span<const StepSlice> slices, Step& step);
  void Abandon(Step& step);
  static absl::StatusOr<HostLogits> AllocateLogits(device::Device& device, int rows, int vocab);
  // Of rows [first, first + count) of the step's logit rows, which are those of the decoder's last
  // logits. Download submits copies of what the host needs whole.
  void DownloadLogits(const Step& step, int64_t first, int64_t count, model::Decoder& decoder,
                      const HostLogits& logits) const;
  void EmitLogits(const Step& step, int64_t first, int64_t count, const HostLogits& logits,
                  const LogitsSink& sink) const;
  static void Attribute(const MicroBatch& part, double cut_blocks, bool handoff,
                        std::vector<SliceAttention>* slices);

  const model::ModelConfig& config_;
  ops::Ops& ops_;
  const Options options_;
  std::unique_ptr<kvcache::InplaceKvCache> cache_;
  std::unique_ptr<attention::HybridAttention> attention_;
  std::unique_ptr<model::Decoder> decoder_;           // Prefill and hybrid steps
  std::unique_ptr<model::Decoder> resident_decoder_;  // Steps inside a hybrid step
  StepRecordings recordings_;
  HostLogits logits_;           // Of decoder_
  HostLogits resident_logits_;  // Of resident_decoder_
};

}  // namespace writescope::runtime
