// What happens when the load changes in the middle of a run: workers that become slow, and a
// neighbour that leaves.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "tests/bench/engine_bench/bench_rig.h"
#include "tests/bench/engine_bench/decode_bench.h"

namespace writescope::bench {

// After some steps every CPU worker takes twice as long for each claim. Rows: before, and the steps
// after, each with the floor by the rates that are in force then.
absl::StatusOr<std::vector<ResultRow>> RunThrottle(BenchRig& rig, const Point& point,
                                                   const std::string& cut, int micro_batches);

// A chat of 512 tokens, all on the device, beside `batch` long sequences. Rows: the chat alone and
// the long ones alone, then both at once; of the chat, step_ms is the time of one of its tokens,
// and floor_ms that of one alone.
absl::StatusOr<std::vector<ResultRow>> RunChat(BenchRig& rig, const Point& point);

// `batch` sequences decode, all but the first end, and the first goes on with copies of its
// streamed blocks kept on the device. Rows: before, and the steps after; floor_ms is the step of
// the first sequence with all its KV on the device.
absl::StatusOr<std::vector<ResultRow>> RunRetention(BenchRig& rig, const Point& point);

}  // namespace writescope::bench
