// Reading prompts: tokens a second, and where the time went.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "tests/bench/engine_bench/bench_rig.h"
#include "tests/bench/engine_bench/decode_bench.h"
#include "tests/bench/engine_bench/result_file.h"

namespace writescope::bench {

// A row for each point: its prompts are read one after the other, each in chunks, and all stay.
absl::StatusOr<std::vector<PrefillRow>> RunPrefill(BenchRig& rig, const std::vector<Point>& points);

}  // namespace writescope::bench
