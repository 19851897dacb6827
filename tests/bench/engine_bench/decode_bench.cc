#include "tests/bench/engine_bench/decode_bench.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"
#include "engine/roofline/roofline.h"
#include "tests/bench/engine_bench/kernel_times.h"

namespace writescope::bench {
namespace {

// Few tokens, so that what is measured is all but attention.
constexpr int64_t kDenseContext = 64;
constexpr int64_t kSpilledLabelBytes = 2 * kGiB;
// The engine has seen enough of both kinds of step in a third of these.
constexpr int kMostStepsToChoose = 64;

// 0 of none.
double Quantile(std::vector<double> values, double quantile) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double at = quantile * static_cast<double>(values.size());
  return values[std::min(values.size() - 1, static_cast<size_t>(at))];
}

runtime::CutMode CutOf(const std::string& cut) {
  return cut == "planned" ? runtime::CutMode::kPlanned : runtime::CutMode::kMeet;
}

attention::SharePlan PlanFor(const std::string& policy, const std::string& cut, double best_share) {
  if (policy == "stream") return {.handoff = false};
  if (policy == "cpu") return {.cpu_share = 1, .handoff = true};
  if (policy == "static") return {.cpu_share = 0.5, .handoff = true};
  if (best_share == 0) return {.handoff = false};
  return {.meet = cut == "meet", .cpu_share = best_share, .handoff = true};
}

using Timings = std::vector<StepTiming>;

// What `decode` does options.steps times after the steps that warm up.
absl::StatusOr<Timings> Repeat(const DecodeOptions& options,
                               const std::function<absl::StatusOr<StepTiming>()>& decode) {
  Timings timings;
  for (int i = 0; i < options.warmup_steps + options.steps; ++i) {
    ASSIGN_OR_RETURN(StepTiming timing, decode());
    if (i >= options.warmup_steps) timings.push_back(std::move(timing));
  }
  return timings;
}

// In as many micro-batches as the planner chooses, once it has seen steps enough, as that of a
// worker has after some seconds.
absl::StatusOr<Timings> RunAsChosen(BenchRig& rig, runtime::StepPlanner planner, double share,
                                    const DecodeOptions& options) {
  const auto decode = [&] { return rig.DecodePlanned(planner, share, options.retain); };
  for (int i = 0; !planner.model().HasChosen(rig.batch()); ++i) {
    if (i == kMostStepsToChoose) {
      return absl::InternalError(absl::StrCat("no choice after ", i, " steps"));
    }
    RETURN_IF_ERROR(decode().status());
  }
  return Repeat(options, decode);
}

ResultRow RowOf(const BenchRig& rig, Timings timings) {
  std::sort(timings.begin(), timings.end(),
            [](const StepTiming& a, const StepTiming& b) { return a.step_s < b.step_s; });
  const StepTiming& median = timings[timings.size() / 2];
  const attention::AttentionStats& stats = median.attention;
  ResultRow row;
  row.step_ms = 1e3 * median.step_s;
  row.step_ms_min = 1e3 * timings.front().step_s;
  row.step_ms_max = 1e3 * timings.back().step_s;
  row.spilled_bytes = rig.SpilledBytes();
  row.steps = static_cast<int>(timings.size());
  row.steps_in_two = static_cast<int>(std::count_if(
      timings.begin(), timings.end(), [](const StepTiming& t) { return t.micro_batches == 2; }));
  const double attended = static_cast<double>(stats.cpu_bytes + stats.link_bytes);
  row.share = attended > 0 ? static_cast<double>(stats.cpu_bytes) / attended : 0;
  row.tokens_per_s = rig.batch() / median.step_s;
  row.cpu_busy_ms = 1e3 * stats.cpu_busy_s;
  row.link_busy_ms = 1e3 * stats.link_busy_s;
  row.both_busy_ms = 1e3 * stats.both_busy_s;
  row.gap_ms = 1e3 * stats.dense_s;
  row.link_wait_ms = 1e3 * stats.link_wait_s;
  row.device_attention_ms = 1e3 * stats.device_attention_s;
  row.copies = stats.copies;
  row.micro_batches = median.micro_batches;
  std::vector<double> out, back;
  for (const StepTiming& timing : timings) {
    const attention::AttentionStats& a = timing.attention;
    out.insert(out.end(), a.handoff_out_s.begin(), a.handoff_out_s.end());
    back.insert(back.end(), a.handoff_back_s.begin(), a.handoff_back_s.end());
  }
  row.handoff_out_us = 1e6 * Quantile(out, 0.5);
  row.handoff_out_p99_us = 1e6 * Quantile(out, 0.99);
  row.handoff_back_us = 1e6 * Quantile(back, 0.5);
  row.handoff_back_p99_us = 1e6 * Quantile(back, 0.99);
  return row;
}

double Mean(double a, double b) { return (a + b) / 2; }

roofline::Rates Mean(const roofline::Rates& a, const roofline::Rates& b) {
  return {.cpu_alone = Mean(a.cpu_alone, b.cpu_alone),
          .cpu_with_link = Mean(a.cpu_with_link, b.cpu_with_link),
          .link_alone = Mean(a.link_alone, b.link_alone),
          .link_with_cpu = Mean(a.link_with_cpu, b.link_with_cpu),
          .device = Mean(a.device, b.device)};
}

struct Variant {
  std::string policy;
  std::string cut;  // "fixed" of all but hybrid
  std::string micro_batches = "1";
};

std::vector<Variant> VariantsOf(const DecodeOptions& options) {
  std::vector<Variant> variants;
  for (const std::string& policy : options.policies) {
    if (policy != "hybrid") {
      variants.push_back({policy, "fixed"});
      continue;
    }
    for (const std::string& cut : options.cuts) {
      for (const std::string& micro_batches : options.micro_batches) {
        variants.push_back({policy, cut, micro_batches});
      }
    }
  }
  return variants;
}

// What of a step no kernel is busy. A record delays the begin of a graph by much and its kernels by
// little, so that the busy time is of recorded steps, and the step's time of those before.
absl::Status MeasureIdle(BenchRig& rig, KernelTimes& times, bool may_replay, int steps,
                         ResultRow* row) {
  RETURN_IF_ERROR(times.Begin());
  for (int i = 0; i < steps; ++i) {
    RETURN_IF_ERROR(rig.Decode({.handoff = false}, false, may_replay).status());
  }
  ASSIGN_OR_RETURN(const std::vector<KernelSpan> spans, times.End());
  if (spans.empty()) return absl::InternalError("no kernel was recorded");
  row->kernels = static_cast<double>(spans.size()) / steps;
  row->gpu_busy_ms = 1e3 * BusySeconds(spans) / steps;
  row->gpu_idle_share = std::max(0.0, 1 - row->gpu_busy_ms / row->step_ms);
  std::printf("kernels: %.0f a step, busy %.3f of %.3f ms, idle share %.4f; within graphs %.4f\n%s",
              row->kernels, row->gpu_busy_ms, row->step_ms, row->gpu_idle_share,
              IdleShareInLaunches(spans), KernelTable(spans).c_str());
  return absl::OkStatus();
}

void Print(const ResultRow& row) {
  const std::string micro_batches =
      row.is_auto ? absl::StrCat("auto, ", row.steps_in_two, " of ", row.steps, " steps in two")
                  : absl::StrCat("x", row.micro_batches);
  std::printf(
      "%4d x %-7ld %-7s %-8s %s spilled %7.2f GiB  share %.3f  step %9.2f ms (%.2f-%.2f)  floor "
      "%9.2f"
      "  raw %9.2f  c1 %.1f p1 %.1f raw %.1f %.1f GB/s  dense %7.2f, of half %.2f  ratio %.3f  cpu "
      "%.1f link %.1f both %.1f gaps %.1f dev-att %.1f awaits-link %.1f "
      "copies %d "
      "hand-off us out %.1f/%.1f back %.1f/%.1f device %.2f host %.2f GiB\n",
      row.batch, row.context_tokens, row.policy.c_str(), row.cut.c_str(), micro_batches.c_str(),
      static_cast<double>(row.spilled_bytes) / static_cast<double>(kGiB), row.share, row.step_ms,
      row.step_ms_min, row.step_ms_max, row.floor_ms, row.floor_raw_ms,
      row.rates.cpu_with_link / 1e9, row.rates.link_with_cpu / 1e9,
      row.raw_rates.cpu_with_link / 1e9, row.raw_rates.link_with_cpu / 1e9, row.dense_ms,
      row.half_dense_ms, row.step_ms / row.floor_ms, row.cpu_busy_ms, row.link_busy_ms,
      row.both_busy_ms, row.gap_ms, row.device_attention_ms, row.link_wait_ms, row.copies,
      row.handoff_out_us, row.handoff_out_p99_us, row.handoff_back_us, row.handoff_back_p99_us,
      static_cast<double>(row.device_bytes_peak) / static_cast<double>(kGiB),
      static_cast<double>(row.host_bytes_peak) / static_cast<double>(kGiB));
  std::fflush(stdout);
}

}  // namespace

absl::StatusOr<Point> ParsePoint(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, 'x');
  Point point;
  int64_t factor = 1;
  absl::string_view context = parts.size() == 2 ? absl::string_view(parts[1]) : "";
  if (absl::ConsumeSuffix(&context, "K")) factor = 1024;
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &point.batch) || point.batch < 1 ||
      !absl::SimpleAtoi(context, &point.context) || point.context < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "' is not BATCHxCONTEXT, such as 16x8K"));
  }
  point.context *= factor;
  return point;
}

absl::StatusOr<double> MeasureDense(BenchRig& rig, int batch, int warmup_steps, int steps) {
  RETURN_IF_ERROR(rig.AddFilled(batch, kDenseContext));
  std::vector<double> seconds;
  for (int i = 0; i < warmup_steps + steps; ++i) {
    ASSIGN_OR_RETURN(const StepTiming timing, rig.Decode({}, false));
    if (i >= warmup_steps) seconds.push_back(timing.step_s);
  }
  rig.RemoveAll();
  return Quantile(seconds, 0.5);
}

absl::StatusOr<std::vector<ResultRow>> RunDecode(BenchRig& rig, const DecodeOptions& options) {
  std::vector<ResultRow> rows;
  std::unique_ptr<KernelTimes> kernel_times;
  if (options.kernel_times) {
    ASSIGN_OR_RETURN(kernel_times, KernelTimes::Create());
  }
  if (!options.real_prefill) RETURN_IF_ERROR(rig.FillRegions());
  for (const Point& point : options.points) {
    ASSIGN_OR_RETURN(const double dense_s,
                     MeasureDense(rig, point.batch, options.warmup_steps, options.steps));
    ASSIGN_OR_RETURN(const double half_dense_s,
                     MeasureDense(rig, (point.batch + 1) / 2, options.warmup_steps, options.steps));
    std::string kv_fill = "seeded fill, a distinct physical page for every byte";
    if (options.real_prefill) {
      ASSIGN_OR_RETURN(const PrefillTiming prefill, rig.AddByPrefill(point.batch, point.context));
      kv_fill = absl::StrCat(
          "prefill of random tokens, ",
          std::llround(static_cast<double>(point.batch * point.context) / prefill.seconds),
          " tokens/s");
    } else {
      RETURN_IF_ERROR(rig.AddFilled(point.batch, point.context));
    }
    const roofline::StepLoad load{.spilled_bytes = static_cast<double>(rig.SpilledBytes()),
                                  .dense_seconds = dense_s};
    roofline::StepLoad parts_load = load;
    parts_load.dense_seconds =
        roofline::PingPongDenseSeconds(half_dense_s, rig.config().num_layers);
    ASSIGN_OR_RETURN(BenchRig::MeasuredRates before, rig.MeasureRates());
    for (const Variant& variant : VariantsOf(options)) {
      const auto& [policy, cut, micro_batches] = variant;
      const roofline::BestShareResult best = roofline::BestShare(load, before.kernels);
      const roofline::BestShareResult best_parts =
          roofline::BestPingPong(parts_load, before.kernels, half_dense_s);
      const int parts = micro_batches == "2" ? 2 : 1;
      const attention::SharePlan plan =
          PlanFor(policy, cut, parts == 2 ? best_parts.share : best.share);
      const bool may_replay = policy != "plain";
      const auto decode = [&rig, &options, &plan, may_replay, parts] {
        return rig.Decode(plan, options.retain, may_replay, parts);
      };
      // Of steps over resident KV there is nothing to choose.
      const bool chooses = micro_batches == "auto" && rig.SpilledBytes() > 0;
      ASSIGN_OR_RETURN(Timings timings,
                       chooses ? RunAsChosen(rig, rig.Planner(CutOf(cut), before.kernels, dense_s),
                                             best.share, options)
                               : Repeat(options, decode));
      ResultRow row = RowOf(rig, std::move(timings));
      row.is_auto = micro_batches == "auto";
      row.model = rig.config().architecture;
      row.batch = point.batch;
      row.context_tokens = point.context;
      row.aggregate_tokens = point.batch * point.context;
      row.policy = policy;
      row.cut = cut;
      // Rates before these steps and behind them: the mean is theirs.
      ASSIGN_OR_RETURN(const BenchRig::MeasuredRates behind, rig.MeasureRates());
      row.rates = Mean(before.kernels, behind.kernels);
      row.raw_rates = Mean(before.raw, behind.raw);
      before = behind;
      row.floor_ms = 1e3 * roofline::BestShare(load, row.rates).step_seconds;
      row.floor_raw_ms = 1e3 * roofline::BestShare(load, row.raw_rates).step_seconds;
      row.half_dense_ms = 1e3 * half_dense_s;
      row.dense_ms = 1e3 * dense_s;
      row.moved_bytes = rig.cache().blocks().moved_bytes();
      row.device_bytes_peak = rig.DeviceBytesInUse();
      row.host_bytes_peak = rig.PeakHostBytes();
      row.kv_fill = kv_fill;
      row.resident = row.spilled_bytes < kSpilledLabelBytes;
      if (kernel_times != nullptr && row.spilled_bytes == 0 && parts == 1) {
        RETURN_IF_ERROR(MeasureIdle(rig, *kernel_times, may_replay, options.steps, &row));
      }
      Print(row);
      rows.push_back(std::move(row));
    }
    rig.RemoveAll();
  }
  return rows;
}

}  // namespace writescope::bench
