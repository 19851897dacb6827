// The format of tests/bench/results/*.json; tests/bench/results_test.py checks it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/roofline/machine_profile.h"

namespace writescope::bench {

struct ResultRow {
  std::string model;
  std::string weights;
  int batch = 0;
  int64_t context_tokens = 0;
  int64_t aggregate_tokens = 0;
  std::string policy;
  std::string cut;
  int micro_batches = 1;  // Of the median step
  bool is_auto = false;   // As the engine chooses; then also
  int steps = 0;          // that were measured,
  int steps_in_two = 0;   // and of these in two micro-batches
  double share = 0;       // Of the spilled bytes, what the CPU attended to
  int64_t spilled_bytes = 0;
  double step_ms = 0;  // Median
  double step_ms_min = 0;
  double step_ms_max = 0;
  // T* by the rates of our own kernels, measured in the same run.
  double floor_ms = 0;
  double floor_raw_ms = 0;  // T* by plain reading and copying in place of attention
  roofline::Rates rates;    // What floor_ms is of, and floor_raw_ms; 0: the file's ceilings
  roofline::Rates raw_rates;
  double dense_ms = 0;
  double half_dense_ms = 0;  // Of half the batch; 0: not measured
  double tokens_per_s = 0;
  int64_t moved_bytes = 0;
  int64_t device_bytes_peak = 0;
  int64_t host_bytes_peak = 0;
  std::string kv_fill;
  bool resident = false;  // Less than 2 GiB spilled
  // Where the step's time went; see attention::AttentionStats.
  double cpu_busy_ms = 0;
  double link_busy_ms = 0;
  double both_busy_ms = 0;
  double gap_ms = 0;
  double link_wait_ms = 0;  // The device waited for a wave of the link
  double device_attention_ms = 0;
  int copies = 0;
  // Of a resident step, where kernels were recorded (kernels > 0): how many there are, how long at
  // least one is at work, and the rest of the step.
  double kernels = 0;
  double gpu_busy_ms = 0;
  double gpu_idle_share = 0;
  // Per layer, over all steps: median and 99th percentile.
  double handoff_out_us = 0;
  double handoff_out_p99_us = 0;
  double handoff_back_us = 0;
  double handoff_back_p99_us = 0;
};

// Prompts read; see PrefillTiming for the times.
struct PrefillRow {
  std::string model;
  std::string weights;
  int batch = 0;
  int64_t context_tokens = 0;
  int64_t aggregate_tokens = 0;
  int chunk_tokens = 0;
  int64_t vram_budget_bytes = 0;
  int64_t kv_bytes = 0;
  int64_t spilled_bytes = 0;  // Of these, at the end
  double seconds = 0;
  double tokens_per_s = 0;
  double attention_s = 0;
  double attention_tflops = 0;  // While it attends
  double dense_s = 0;
  int64_t link_bytes = 0;
  double link_busy_s = 0;
  double link_wait_share = 0;  // Of all the time
  int64_t moved_bytes = 0;
  int64_t device_bytes_peak = 0;
  int64_t host_bytes_peak = 0;
};

struct ResultFile {
  std::string benchmark;
  std::string machine;
  std::string command;
  roofline::MachineProfile profile;
  roofline::Rates raw_rates;
  std::vector<ResultRow> rows;
  std::vector<PrefillRow> prefill_rows;  // Of the benchmark of that name, which has no others
};

// Names the processors of this machine.
std::string DescribeMachine(const std::string& accelerator);
absl::Status WriteResultFile(const ResultFile& file, const std::string& path);

}  // namespace writescope::bench
