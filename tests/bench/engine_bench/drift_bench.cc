#include "tests/bench/engine_bench/drift_bench.h"

#include <algorithm>
#include <atomic>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"
#include "engine/roofline/roofline.h"

namespace writescope::bench {
namespace {

constexpr int kStepsBefore = 4;
constexpr int kStepsAfter = 10;
constexpr double kSlowdown = 2;
constexpr int64_t kChatContext = 512;
constexpr int kChatSteps = 24;
// With what it says in the steps below it is still a short one.
constexpr int64_t kChatMoreBlocks = 8;
constexpr int kStepsBeside = 2;

// Longer than a worker takes for a claim: it has waited, for a query or for others.
constexpr double kLongestClaimSeconds = 1e-3;

// Makes a thread's time between two claims of a layer kSlowdown times as long.
class Throttle {
 public:
  bool OnClaim(attention::Side side, int layer) {
    if (side != attention::Side::kCpu) return true;
    thread_local int last_layer = -1;
    thread_local double last_s = 0;
    const double now_s = device::NowSeconds();
    if (on_.load(std::memory_order_relaxed) && layer == last_layer) {
      // A wait is not slowed down too, or each layer would wait for twice what the one before took.
      const double claim_s = std::min(now_s - last_s, kLongestClaimSeconds);
      const double until_s = now_s + (kSlowdown - 1) * claim_s;
      while (device::NowSeconds() < until_s) {
      }
    }
    last_layer = layer;
    last_s = device::NowSeconds();
    return true;
  }
  void Set(bool on) { on_.store(on); }

 private:
  std::atomic<bool> on_{false};
};

ResultRow RowOf(BenchRig& rig, const StepTiming& timing, const Point& point, std::string policy,
                const std::string& cut, double floor_s) {
  const attention::AttentionStats& stats = timing.attention;
  const double attended = static_cast<double>(stats.cpu_bytes + stats.link_bytes);
  ResultRow row;
  row.model = rig.config().architecture;
  row.batch = rig.batch();
  row.context_tokens = point.context;
  row.aggregate_tokens = rig.batch() * point.context;
  row.policy = std::move(policy);
  row.cut = cut;
  row.micro_batches = timing.micro_batches;
  row.share = attended > 0 ? static_cast<double>(stats.cpu_bytes) / attended : 0;
  row.spilled_bytes = stats.spilled_bytes;
  row.resident = row.spilled_bytes < 2 * kGiB;
  row.step_ms = row.step_ms_min = row.step_ms_max = 1e3 * timing.step_s;
  row.floor_ms = 1e3 * floor_s;
  row.tokens_per_s = rig.batch() / timing.step_s;
  row.moved_bytes = rig.cache().blocks().moved_bytes();
  row.device_bytes_peak = rig.DeviceBytesInUse();
  row.host_bytes_peak = rig.PeakHostBytes();
  row.kv_fill = "seeded fill, a distinct physical page for every byte";
  std::printf(
      "%-28s %3d x %-7ld spilled %7.2f GiB share %.3f step %8.2f ms floor %8.2f ratio %.3f\n",
      row.policy.c_str(), row.batch, row.context_tokens,
      static_cast<double>(row.spilled_bytes) / static_cast<double>(kGiB), row.share, row.step_ms,
      row.floor_ms, row.step_ms / row.floor_ms);
  std::fflush(stdout);
  return row;
}

}  // namespace

absl::StatusOr<std::vector<ResultRow>> RunThrottle(BenchRig& rig, const Point& point,
                                                   const std::string& cut, int micro_batches) {
  std::vector<ResultRow> rows;
  Throttle throttle;
  RETURN_IF_ERROR(rig.FillRegions());
  ASSIGN_OR_RETURN(const double dense_s, MeasureDense(rig, point.batch));
  RETURN_IF_ERROR(rig.AddFilled(point.batch, point.context));
  rig.SetClaimHook([&](attention::Side side, int layer) { return throttle.OnClaim(side, layer); });
  const roofline::StepLoad load{.spilled_bytes = static_cast<double>(rig.SpilledBytes()),
                                .dense_seconds = dense_s};
  // Once, so that floors before and after are by one measure.
  ASSIGN_OR_RETURN(const BenchRig::MeasuredRates measured, rig.MeasureRates());
  roofline::Rates rates = measured.kernels;
  double share = roofline::BestShare(load, rates).share;
  const auto decode = [&](const std::string& name) -> absl::Status {
    ASSIGN_OR_RETURN(const StepTiming timing,
                     rig.Decode({.meet = cut == "meet", .cpu_share = share, .handoff = true}, false,
                                /*may_replay=*/true, micro_batches));
    const double floor_s = roofline::BestShare(load, rates).step_seconds;
    rows.push_back(RowOf(rig, timing, point, name, cut, floor_s));
    rows.back().dense_ms = 1e3 * dense_s;
    return absl::OkStatus();
  };
  for (int i = 0; i < kStepsBefore; ++i) RETURN_IF_ERROR(decode("before"));
  throttle.Set(true);
  rates.cpu_alone /= kSlowdown;
  rates.cpu_with_link /= kSlowdown;
  for (int i = 0; i < kStepsAfter; ++i) {
    RETURN_IF_ERROR(decode(absl::StrCat("workers at half rate, step ", i + 1)));
  }
  rig.SetClaimHook(nullptr);
  rig.RemoveAll();
  return rows;
}

absl::StatusOr<std::vector<ResultRow>> RunChat(BenchRig& rig, const Point& point) {
  std::vector<ResultRow> rows;
  RETURN_IF_ERROR(rig.FillRegions());
  // It comes last, when the long ones have taken what they may, and is moved to the front.
  RETURN_IF_ERROR(rig.AddFilled(point.batch, point.context));
  RETURN_IF_ERROR(rig.AddFilled(1, kChatContext, kChatMoreBlocks));
  rig.MoveLastToFront();
  StepTiming chat;
  for (int i = 0; i < kChatSteps; ++i) {
    ASSIGN_OR_RETURN(const StepTiming timing, rig.DecodeFirst());
    if (i >= kChatSteps / 2) chat.step_s += timing.step_s / (kChatSteps - kChatSteps / 2);
  }
  const Point chat_point{.batch = 1, .context = kChatContext};
  rows.push_back(RowOf(rig, chat, chat_point, "chat alone", "resident", chat.step_s));
  const attention::SharePlan plan{.meet = true, .cpu_share = 0.6, .handoff = true};
  double alone_s = 1e9;
  for (int i = 0; i < kStepsBefore; ++i) {
    ASSIGN_OR_RETURN(const StepTiming timing, rig.DecodeFrom(1, plan));
    alone_s = std::min(alone_s, timing.step_s);
    rows.push_back(RowOf(rig, timing, point, "batch alone", "meet", alone_s));
    rows.back().batch = point.batch;
  }
  for (int i = 0; i < kStepsBeside; ++i) {
    ASSIGN_OR_RETURN(const BenchRig::BesideTiming timing, rig.DecodeBeside(plan));
    rows.push_back(RowOf(rig, timing.step, point, "batch beside a chat", "meet", alone_s));
    rows.back().batch = point.batch;
    const StepTiming token{.step_s = timing.step.step_s / std::max(1, timing.first_steps)};
    rows.push_back(RowOf(rig, token, chat_point, "chat beside a batch", "resident", chat.step_s));
    rows.back().batch = 1;
  }
  rig.RemoveAll();
  return rows;
}

absl::StatusOr<std::vector<ResultRow>> RunRetention(BenchRig& rig, const Point& point) {
  std::vector<ResultRow> rows;
  RETURN_IF_ERROR(rig.FillRegions());
  // Alone and on the device: what retention has to come near to.
  RETURN_IF_ERROR(rig.AddFilled(1, point.context));
  double resident_s = 1e9;
  for (int i = 0; i < kStepsBefore; ++i) {
    ASSIGN_OR_RETURN(const StepTiming timing, rig.Decode({}, false));
    resident_s = std::min(resident_s, timing.step_s);
    rows.push_back(RowOf(rig, timing, point, "alone", "resident", resident_s));
  }
  rig.RemoveAll();
  RETURN_IF_ERROR(rig.AddFilled(point.batch, point.context));
  const attention::SharePlan plan{.meet = true, .cpu_share = 0.6, .handoff = true};
  for (int i = 0; i < kStepsBefore; ++i) {
    ASSIGN_OR_RETURN(const StepTiming timing, rig.Decode(plan, true));
    rows.push_back(RowOf(rig, timing, point, "all", "meet", resident_s));
  }
  // The first has the device's memory: it leaves, and the last stays.
  while (rig.batch() > 1) rig.RemoveFirst();
  for (int i = 0; i < kStepsAfter; ++i) {
    ASSIGN_OR_RETURN(const StepTiming timing, rig.Decode(plan, true));
    rows.push_back(
        RowOf(rig, timing, point, absl::StrCat("one left, step ", i + 1), "meet", resident_s));
  }
  rig.RemoveAll();
  return rows;
}

}  // namespace writescope::bench
