#include "tests/bench/engine_bench/prefill_bench.h"

#include <algorithm>
#include <cstdio>

#include "engine/base/status_macros.h"
#include "engine/base/units.h"

namespace writescope::bench {
namespace {

constexpr int64_t kWarmUpTokens = 8192;

// A multiplication and an addition for each value of the keys and of the values that a query sees;
// of heads, whatever a cache keeps and an implementation multiplies.
double AttentionFlop(const model::ModelConfig& config, const Point& point) {
  const double context = static_cast<double>(point.context);
  const double seen = context * (context + 1) / 2;
  return 2.0 * (config.qk_head_dim() + config.o_head_dim()) * config.num_heads * config.num_layers *
         seen * point.batch;
}

}  // namespace

absl::StatusOr<std::vector<PrefillRow>> RunPrefill(BenchRig& rig,
                                                   const std::vector<Point>& points) {
  std::vector<PrefillRow> rows;
  for (const Point& point : points) {
    RETURN_IF_ERROR(rig.AddByPrefill(1, std::min(point.context, kWarmUpTokens)).status());
    rig.RemoveAll();
    ASSIGN_OR_RETURN(const PrefillTiming timing, rig.AddByPrefill(point.batch, point.context));
    PrefillRow row;
    row.model = rig.config().architecture;
    row.batch = point.batch;
    row.context_tokens = point.context;
    row.aggregate_tokens = point.batch * point.context;
    row.chunk_tokens = rig.sized().options.prefill_chunk_tokens;
    row.vram_budget_bytes = rig.sized().plan.device_budget_bytes;
    row.spilled_bytes = rig.SpilledBytes();
    row.kv_bytes = row.aggregate_tokens * rig.sized().plan.kv_bytes_per_token;
    row.seconds = timing.seconds;
    row.tokens_per_s = static_cast<double>(row.aggregate_tokens) / timing.seconds;
    row.attention_s = timing.attention_s;
    row.attention_tflops = AttentionFlop(rig.config(), point) / timing.attention_s * 1e-12;
    row.dense_s = timing.dense_s;
    row.link_bytes = timing.link_bytes;
    row.link_busy_s = timing.link_busy_s;
    row.link_wait_share = timing.link_wait_s / timing.seconds;
    row.moved_bytes = rig.cache().blocks().moved_bytes();
    row.device_bytes_peak = rig.DeviceBytesInUse();
    row.host_bytes_peak = rig.PeakHostBytes();
    std::printf(
        "%3d x %-7ld spilled %6.2f of %6.2f GiB: %6.0f tokens/s, %.2f s; attention %.2f s, %.0f "
        "TFLOP/s; dense %.2f s; waits for the link %.3f\n",
        row.batch, row.context_tokens,
        static_cast<double>(row.spilled_bytes) / static_cast<double>(kGiB),
        static_cast<double>(row.kv_bytes) / static_cast<double>(kGiB), row.tokens_per_s,
        row.seconds, row.attention_s, row.attention_tflops, row.dense_s, row.link_wait_share);
    std::fflush(stdout);
    rows.push_back(row);
    rig.RemoveAll();
  }
  return rows;
}

}  // namespace writescope::bench
