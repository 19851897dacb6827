#include "tests/bench/engine_bench/timeline.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/base/status_macros.h"
#include "engine/roofline/roofline.h"

namespace writescope::bench {
namespace {

using attention::Activity;
using attention::TraceSpan;

constexpr int kSteps = 4;
constexpr int kLayersShown = 3;
constexpr int kWidth = 1200;
constexpr int kLeft = 130;
constexpr int kRowHeight = 34;
constexpr int kTop = 60;

struct Row {
  Activity activity;
  const char* name;
  const char* color;
};
constexpr std::array<Row, 5> kRows = {{{Activity::kCopy, "link: copies", "#3b7dd8"},
                                       {Activity::kCpuAttention, "CPU: attention", "#d8743b"},
                                       {Activity::kDeviceAttention, "GPU: attention", "#3ba55d"},
                                       {Activity::kDense, "GPU: dense", "#8d5bc1"},
                                       {Activity::kAwaitCpu, "GPU: waits for CPU", "#c9c9c9"}}};

struct Window {
  double start_s = 0;
  double end_s = 0;
  double length() const { return end_s - start_s; }
};

// From the dense part of a layer in the middle to that of the layer kLayersShown on.
Window MiddleOf(const attention::StepTrace& trace, int num_layers) {
  const int first = std::max(0, num_layers / 2 - 1);
  const int last = std::min(num_layers - 1, first + kLayersShown);
  Window window;
  for (const TraceSpan& span : trace) {
    if (span.activity != Activity::kDense) continue;
    if (span.layer == first) window.start_s = span.start_s;
    if (span.layer == last) window.end_s = span.end_s;
  }
  return window;
}

// Of spans that overlap, as those of two turns may, each moment counts once.
double BusySeconds(const attention::StepTrace& trace, Activity activity, const Window& window) {
  double busy_s = 0;
  double until_s = window.start_s;
  for (const TraceSpan& span : trace) {
    if (span.activity != activity) continue;
    const double end_s = std::min(span.end_s, window.end_s);
    busy_s += std::max(0.0, end_s - std::max(span.start_s, until_s));
    until_s = std::max(until_s, end_s);
  }
  return busy_s;
}

std::string Svg(const attention::StepTrace& trace, const Window& window, const std::string& title) {
  const double scale = (kWidth - kLeft - 20) / window.length();
  const int height = kTop + kRowHeight * static_cast<int>(kRows.size()) + 40;
  std::string svg = absl::StrFormat(
      "<svg xmlns='http://www.w3.org/2000/svg' width='%d' height='%d' font-family='sans-serif' "
      "font-size='13'>\n<rect width='100%%' height='100%%' fill='white'/>\n"
      "<text x='10' y='24' font-size='15'>%s</text>\n",
      kWidth, height, title);
  for (size_t r = 0; r < kRows.size(); ++r) {
    const int y = kTop + kRowHeight * static_cast<int>(r);
    absl::StrAppendFormat(&svg, "<text x='10' y='%d'>%s</text>\n", y + 20, kRows[r].name);
    for (const TraceSpan& span : trace) {
      if (span.activity != kRows[r].activity) continue;
      const double start_s = std::max(span.start_s, window.start_s);
      const double end_s = std::min(span.end_s, window.end_s);
      if (end_s <= start_s) continue;
      absl::StrAppendFormat(&svg, "<rect x='%.2f' y='%d' width='%.2f' height='%d' fill='%s'/>\n",
                            kLeft + (start_s - window.start_s) * scale, y + 4,
                            std::max(0.2, (end_s - start_s) * scale), kRowHeight - 10,
                            kRows[r].color);
    }
  }
  for (int tick = 0; tick <= 10; ++tick) {
    const double x = kLeft + tick * window.length() / 10 * scale;
    absl::StrAppendFormat(&svg, "<text x='%.1f' y='%d' font-size='11'>%.2f ms</text>\n", x,
                          height - 14, 1e3 * tick * window.length() / 10);
  }
  return svg + "</svg>\n";
}

}  // namespace

absl::StatusOr<std::string> WriteTimeline(BenchRig& rig, const Point& point, int micro_batches,
                                          const std::string& path) {
  RETURN_IF_ERROR(rig.FillRegions());
  ASSIGN_OR_RETURN(const double dense_s, MeasureDense(rig, point.batch));
  RETURN_IF_ERROR(rig.AddFilled(point.batch, point.context));
  const roofline::BestShareResult best = roofline::BestShare(
      {.spilled_bytes = static_cast<double>(rig.SpilledBytes()), .dense_seconds = dense_s},
      rig.profile().rates);
  StepTiming timing;
  for (int i = 0; i < kSteps; ++i) {
    ASSIGN_OR_RETURN(timing,
                     rig.Decode({.meet = true, .cpu_share = best.share, .handoff = true}, false,
                                /*may_replay=*/true, micro_batches));
  }
  const attention::StepTrace trace = rig.Trace();
  rig.RemoveAll();
  const Window window = MiddleOf(trace, rig.config().num_layers);
  if (window.length() <= 0) return absl::InternalError("the step left no trace");
  const std::string title =
      absl::StrFormat("%s, %d x %d tokens%s: %d layers of a step of %.1f ms (floor %.1f ms)",
                      rig.config().architecture, point.batch, point.context,
                      timing.micro_batches == 2 ? " in two micro-batches" : "", kLayersShown,
                      1e3 * timing.step_s, 1e3 * best.step_seconds);
  std::ofstream out(path);
  out << Svg(trace, window, title);
  if (!out) return absl::InternalError(absl::StrCat("cannot write ", path));
  std::string text = title + "\n";
  for (const Row& row : kRows) {
    absl::StrAppendFormat(&text, "  %-20s %5.1f %% of the time shown\n", row.name,
                          100 * BusySeconds(trace, row.activity, window) / window.length());
  }
  return text;
}

}  // namespace writescope::bench
