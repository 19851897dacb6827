// A picture of one step: who was at work when.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "tests/bench/engine_bench/bench_rig.h"
#include "tests/bench/engine_bench/decode_bench.h"

namespace writescope::bench {

// Runs some steps of the point with `meet`, in one or two micro-batches, and writes the middle
// layers of the last one as an SVG; returns the text that names what each party's idle time was.
absl::StatusOr<std::string> WriteTimeline(BenchRig& rig, const Point& point, int micro_batches,
                                          const std::string& path);

}  // namespace writescope::bench
