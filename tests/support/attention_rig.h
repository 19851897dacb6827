// Hybrid attention over a cache with known keys and values, and the plain answer beside it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "engine/attention/hybrid_attention.h"
#include "engine/ops/ops.h"
#include "tests/support/cache_rig.h"
#include "tests/support/plain_attention.h"

namespace writescope::testing {

// A query row of one head, in base-2 scale.
using QuerySource =
    std::function<void(int layer, int reader, int64_t position, int head, std::span<float> q)>;
// Uniform with the given standard deviation of scores against RandomKv keys.
QuerySource RandomQueries(uint64_t seed, int k_dim, double score_sigma);

struct AttentionRigOptions {
  CacheRigOptions cache;
  int num_heads = 4;
  int workers = 2;
  int64_t ring_blocks = 4;
  absl::Duration wait_limit = absl::Seconds(10);
  absl::Duration nap = absl::Microseconds(20);
};

// A sequence's tokens of one step.
struct StepPart {
  int slot = 0;
  std::vector<TokenId> tokens;
};

struct StepRequest {
  std::vector<StepPart> parts;
  attention::SharePlan share;
  int64_t retain_keep_free = -1;
  // Two micro-batches, of which the first has so many parts; 0: one.
  size_t first_parts = 0;
  // Without it the step is given up afterwards, so that the next one finds the same cache.
  bool keep = false;
  // Not even submitted, from this turn on: the step is cancelled. -1: all are.
  int stop_before_turn = -1;
  // A test's chance to spoil what a micro-batch attends to, when all is known and nothing has
  // begun.
  std::function<void(attention::StepAttention&)> plant;
};

struct StepOutput {
  absl::Status status;
  attention::AttentionStats stats;
  attention::StepAttention attention;  // Of the first micro-batch
  std::vector<float> out;              // [num_layers, rows, num_heads, v_dim]
  int num_rows = 0;
};

class AttentionRig {
 public:
  explicit AttentionRig(const AttentionRigOptions& options, const DeviceWrapper& wrap = nullptr);
  ~AttentionRig();

  CacheRig& cache() { return cache_; }
  attention::HybridAttention& hybrid() { return *hybrid_; }
  const AttentionRigOptions& options() const { return options_; }
  void SetQueries(QuerySource source) { queries_ = std::move(source); }
  // Before anything is written.
  void SetKv(KvSource source) {
    cache_.SetKv(std::move(source));
    known_heads_.clear();
  }
  // Called where a layer's attention waits for the link or the CPU.
  void SetBetween(attention::HybridAttention::Between between) { between_ = std::move(between); }

  StepOutput Run(const StepRequest& request);

  // By layer, row and head: what Run should give for the request. Call before Run when the step is
  // kept, else at any time.
  std::vector<PlainOutput> Plain(const StepRequest& request);

  // The worst error of any value as a part of what the tolerance allows; above 1 is wrong, and so
  // is a NaN, which counts as infinite. `where` says which one it is.
  struct Worst {
    double ratio = 0;
    std::string where;
  };
  Worst Compare(const StepOutput& output, const std::vector<PlainOutput>& plain) const;

  // What the cache holds of a sequence, for one KV head.
  const PlainHead& Head(int slot, int layer, int kv_head) {
    return HeadOf(slot, layer, kv_head, cache_.tokens(slot));
  }

  int k_dim() const { return options_.cache.geometry.k_dim; }
  int v_dim() const { return options_.cache.geometry.v_dim; }

 private:
  // A micro-batch: parts of the request, and the rows that they are.
  struct MicroBatch {
    size_t first_part = 0;
    size_t num_parts = 0;
    int first_row = 0;
    int num_rows = 0;
  };
  absl::Status RunTurns(const StepRequest& request, const std::vector<kvcache::WritePlan>& plans,
                        const std::vector<MicroBatch>& batches, StepOutput* output);
  float* QueryRows(const MicroBatch& batch) {
    return reinterpret_cast<float*>(q_.data()) +
           int64_t{batch.first_row} * options_.num_heads * k_dim();
  }
  // Keys, values and queries.
  void SubmitDense(const StepRequest& request, const std::vector<kvcache::WritePlan>& plans,
                   const MicroBatch& batch, int layer);
  // Keys and values of the sequence with these tokens, made once and then extended.
  const PlainHead& HeadOf(int slot, int layer, int kv_head, const std::vector<TokenId>& tokens);

  const AttentionRigOptions options_;
  CacheRig cache_;
  std::unique_ptr<ops::Ops> ops_;
  std::unique_ptr<attention::HybridAttention> hybrid_;
  QuerySource queries_;
  attention::HybridAttention::Between between_;
  struct KnownHead {
    std::vector<TokenId> tokens;
    PlainHead head;
  };
  std::map<std::tuple<int, int, int>, KnownHead> known_heads_;  // By slot, layer, KV head
  int max_rows_ = 0;
  device::Buffer q_;       // [max_rows, num_heads, k_dim]
  device::Buffer states_;  // o, m, l
  device::Buffer out_;     // [max_rows, num_heads, v_dim]
};

// Steps of one token for each slot.
StepRequest DecodeRequest(std::span<const int> slots, const attention::SharePlan& share);

}  // namespace writescope::testing
