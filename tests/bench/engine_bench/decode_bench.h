// Decode steps of points (batch x context) under policies, each measured and compared with its
// floor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/bench/engine_bench/bench_rig.h"
#include "tests/bench/engine_bench/result_file.h"

namespace writescope::bench {

struct Point {
  int batch = 1;
  int64_t context = 0;
};
// "128x8K", "8x131072".
absl::StatusOr<Point> ParsePoint(const std::string& text);

struct DecodeOptions {
  std::vector<Point> points;
  // hybrid, stream (all spilled KV goes to the device), cpu (all of it stays), static (half), plain
  // (hybrid, with resident steps submitted call by call).
  std::vector<std::string> policies;
  std::vector<std::string> cuts;                   // For hybrid: meet, planned
  std::vector<std::string> micro_batches = {"1"};  // For hybrid: 1, 2, auto
  int steps = 10;
  int warmup_steps = 3;  // With auto after those in which the engine comes to its choice
  bool real_prefill = false;
  bool retain = false;
  // Resident steps once more with a record of all kernels, for the time in which none ran.
  bool kernel_times = false;
};

// Median seconds of a step of the batch with nothing spilled and next to nothing to attend to.
absl::StatusOr<double> MeasureDense(BenchRig& rig, int batch, int warmup_steps = 3, int steps = 5);

absl::StatusOr<std::vector<ResultRow>> RunDecode(BenchRig& rig, const DecodeOptions& options);

}  // namespace writescope::bench
