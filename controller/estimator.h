// Estimator: from measured steps to the rates and times that engine/roofline computes with. Rates
// are ratios (bytes / busy time), not a fit: the many parameters of one max() cannot be told apart
// by fitting. Total: no telemetry, however wrong, makes it return a negative or non-finite number.
// Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "controller/robust_mean.h"
#include "controller/worker_api.h"
#include "engine/roofline/roofline.h"
#include "engine/roofline/share_table.h"

namespace writescope::controller {

struct EstimatorOptions {
  RobustMean::Options rate;
  RobustMean::Options dense;
  // Below these a ratio says more about the clock than about the machine.
  double min_busy_seconds = 20e-6;
  uint64_t min_bytes = 16 << 10;
};

class Estimator {
 public:
  enum class Verdict { kUsed, kGarbage, kNotDecode, kNothingSpilled };

  explicit Estimator(const EstimatorOptions& options = {});

  // What the worker believes of its machine; measurements replace it one by one.
  void Seed(const roofline::Rates& rates);

  Verdict Add(const StepSample& sample);

  roofline::Rates rates() const;

  // D of a batch: of its power-of-two bucket, else interpolated between the nearest measured ones;
  // 0 before any.
  double DenseSeconds(uint32_t batch_size) const;
  // The part of D in which the link was seen to stream ahead; 1 before any was measured.
  double AheadFraction() const;
  // Attention over `resident_bytes`; 0 before any was measured.
  double ResidentSeconds(uint64_t resident_bytes) const;

  // Buckets 1, 2, 4, ... up to at least `max_batch`, for a table. D is less than DenseSeconds()
  // where it leaves the CPU without a query for long, so that it comes to be measured.
  std::vector<roofline::BatchLoad> BatchLoads(uint32_t max_batch, uint64_t resident_bytes) const;

  // Steps with spilled KV that were used.
  uint64_t num_used() const { return num_used_; }
  // Times that a rate was seen to have changed for good, rather than to be noisy.
  uint64_t cpu_changes() const { return cpu_.changes; }
  uint64_t link_changes() const { return link_.changes; }

 private:
  static constexpr int kNumBuckets = 17;  // Batches up to 65,536.

  // CPU or link: its rate beside the other, and how much of its rate alone that is.
  struct Side {
    RobustMean with_other;
    RobustMean contention;  // with / alone, in [kMinContention, 1].
    uint64_t changes = 0;
  };
  struct SideSample {
    double bytes;
    double busy_seconds;
    double both_seconds;
    double bytes_both;
  };

  void AddSide(const SideSample& sample, Side& side);
  void AddAhead(const StepSample& sample);
  void AddDense(const StepSample& sample);
  void Doubt(const StepSample& sample, bool no_query);
  static int BucketOf(uint32_t batch_size);

  EstimatorOptions options_;
  Side cpu_;
  Side link_;
  RobustMean device_;
  RobustMean ahead_;
  std::array<RobustMean, kNumBuckets> dense_;
  std::array<double, kNumBuckets> trust_;  // In D, in (0, 1], by the table
  uint64_t num_used_ = 0;
};

}  // namespace writescope::controller
