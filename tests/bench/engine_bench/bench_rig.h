// The engine's parts around one model, with sequences whose KV is filled as a benchmark needs it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/device/device.h"
#include "engine/model/device_weights.h"
#include "engine/ops/ops.h"
#include "engine/roofline/machine_profile.h"
#include "engine/runtime/memory_planner.h"
#include "engine/runtime/model_runner.h"
#include "engine/runtime/rate_probe.h"
#include "engine/runtime/step_planner.h"

namespace writescope::bench {

// One forward pass over the batch, as a measurement.
struct StepTiming {
  double step_s = 0;  // Wall-clock, from the first submission to the sampled tokens
  int micro_batches = 1;
  attention::AttentionStats attention;
};

// Prompts read from the first chunk to the last; times are wall-clock, summed over layers and
// chunks.
struct PrefillTiming {
  double seconds = 0;
  double attention_s = 0;  // On the device
  double dense_s = 0;
  double link_wait_s = 0;
  double link_busy_s = 0;
  int64_t link_bytes = 0;
};

class BenchRig {
 public:
  static absl::StatusOr<std::unique_ptr<BenchRig>> Create(const runtime::EngineOptions& options);
  ~BenchRig();

  const runtime::SizedPlan& sized() const { return sized_; }
  const model::ModelConfig& config() const { return config_; }
  device::Device& device() { return *device_; }
  const roofline::MachineProfile& profile() const { return profile_; }
  // By plain reading in place of attention: what memory and link would allow.
  const roofline::Rates& raw_rates() const { return raw_rates_; }
  // Both once more, now, and over the memory of the spilled KV itself where there is enough of it:
  // a host that others use too has other rates from second to second.
  struct MeasuredRates {
    roofline::Rates kernels;
    roofline::Rates raw;
  };
  absl::StatusOr<MeasuredRates> MeasureRates();
  kvcache::InplaceKvCache& cache() { return runner_->cache(); }

  // In use on the device, as its driver says (on the CPU device: as it counts itself), and the
  // largest resident set of this process so far.
  int64_t DeviceBytesInUse() const;
  int64_t PeakHostBytes() const;

  // Every region's bytes become seeded random keys and values, so that filled sequences attend to
  // ordinary numbers on pages of their own.
  absl::Status FillRegions();
  // Adds `batch` sequences of `context` tokens whose blocks hold what FillRegions left there; each
  // expects `more_blocks` to come.
  absl::Status AddFilled(int batch, int64_t context, int64_t more_blocks = 1);
  // The same by reading prompts of random tokens.
  absl::StatusOr<PrefillTiming> AddByPrefill(int batch, int64_t context);
  void RemoveAll();
  void RemoveFirst();
  void MoveLastToFront();
  void SetClaimHook(attention::ClaimHook hook) {
    runner_->attention().SetClaimHook(std::move(hook));
  }
  int batch() const { return static_cast<int>(slots_.size()); }
  // Spilled bytes that a step over the batch reads.
  int64_t SpilledBytes() const { return runner_->SpilledBytes(slots_); }

  // One token for every sequence; the next are the most likely ones.
  // With `may_replay` resident steps go as graphs. In one or two micro-batches.
  absl::StatusOr<StepTiming> Decode(const attention::SharePlan& share, bool retain,
                                    bool may_replay = true, int micro_batches = 1);
  // The same as the engine takes it by what it has learnt: the CPU's share of a step of the whole
  // batch is `cpu_share`, in how many micro-batches the planner chooses.
  absl::StatusOr<StepTiming> DecodePlanned(runtime::StepPlanner& planner, double cpu_share,
                                           bool retain);
  // An engine's own, that has learnt nothing but the rates and D of the batch.
  runtime::StepPlanner Planner(runtime::CutMode cut, const roofline::Rates& rates,
                               double dense_s) const;
  // The first sequence, all on the device, steps inside a step of the others, as the engine does
  // it.
  struct BesideTiming {
    StepTiming step;
    double first_s = 0;  // What its steps took
    int first_steps = 0;
  };
  absl::StatusOr<BesideTiming> DecodeBeside(const attention::SharePlan& share);
  absl::StatusOr<StepTiming> DecodeFirst() { return Step(0, 1, {}); }
  // One step of the sequences [first, batch()).
  absl::StatusOr<StepTiming> DecodeFrom(int first, const attention::SharePlan& share);
  attention::StepTrace Trace() const { return runner_->attention().Trace(); }
  // Of the last step, by sequence.
  const std::vector<TokenId>& next_tokens() const { return next_tokens_; }

 private:
  BenchRig() = default;
  absl::Status Append(int slot, int64_t num_tokens, PrefillTiming* timing);
  // Each sequence its own: a router sends equal ones to the same experts.
  void ChooseTokens();
  absl::StatusOr<StepTiming> Step(size_t first, size_t count, const runtime::StepOptions& options,
                                  bool may_replay = true);

  runtime::SizedPlan sized_;
  model::ModelConfig config_;
  roofline::MachineProfile profile_;
  roofline::Rates raw_rates_;
  runtime::RateProbeOptions probe_;
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<ops::Ops> ops_;
  std::unique_ptr<model::DeviceWeights> weights_;
  std::unique_ptr<runtime::ModelRunner> runner_;
  std::vector<int> slots_;
  std::vector<TokenId> next_tokens_;
};

}  // namespace writescope::bench
