#include "controller/replay.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "controller/decision_log.h"

namespace writescope::controller {
namespace {

// Of steps with spilled KV, over the rows: how long they take by each of the policies.
struct Totals {
  double logged = 0;
  double replayed = 0;
  double wanted = 0;
  double worst_against_lowest = 0;
  int logged_pushes = 0;
  int replayed_pushes = 0;
};

Totals Sum(const std::vector<ReplayRow>& rows) {
  Totals totals;
  for (const ReplayRow& row : rows) {
    totals.logged += row.logged_seconds;
    totals.replayed += row.replayed_seconds;
    totals.wanted += row.wanted_seconds;
    if (row.lowest_seconds > 0) {
      totals.worst_against_lowest =
          std::max(totals.worst_against_lowest, row.replayed_seconds / row.lowest_seconds);
    }
    totals.logged_pushes += row.logged_action == Action::kPush ? 1 : 0;
    totals.replayed_pushes += row.replayed_action == Action::kPush ? 1 : 0;
  }
  return totals;
}

}  // namespace

absl::StatusOr<Replay> ReplayLog(std::istream& log, const PolicyOptions& options) {
  Replay replay;
  std::optional<roofline::ShareTable> in_force;
  std::string worker_id;
  std::string line;
  while (std::getline(log, line)) {
    if (line.empty()) continue;
    absl::StatusOr<DecisionRecord> record = DecisionFromJson(line);
    if (!record.ok()) {
      if (replay.bad_lines++ == 0) replay.first_bad_line = std::string(record.status().message());
      continue;
    }
    // A worker that has started anew has nothing in force.
    if (record->worker_id != worker_id) in_force.reset();
    worker_id = record->worker_id;
    PolicyInput input = std::move(record->input);
    input.in_force = in_force;
    const Decision decision = Decide(options, input);
    if (decision.action != Action::kHold) in_force = decision.table;

    ReplayRow row;
    row.time = record->time;
    row.batch_size = input.batch_size;
    row.spilled_bytes = input.spilled_bytes;
    row.measured_step_seconds = record->measured_step_seconds;
    row.logged_share = record->decision.share;
    row.replayed_share = decision.share;
    row.wanted_share = decision.wanted_share;
    row.logged_seconds = record->decision.predicted_seconds;
    row.replayed_seconds = decision.predicted_seconds;
    row.wanted_seconds = decision.predicted_wanted_seconds;
    row.lowest_seconds = decision.predicted_lowest_seconds;
    row.logged_action = record->decision.action;
    row.replayed_action = decision.action;
    replay.rows.push_back(row);
  }
  if (replay.rows.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "no decision to replay: ", replay.bad_lines, " lines that are none",
        replay.bad_lines > 0 ? absl::StrCat("; the first: ", replay.first_bad_line) : ""));
  }
  return replay;
}

std::string FormatReplay(const Replay& replay, int max_rows) {
  const size_t num_rows = replay.rows.size();
  const size_t shown = max_rows == 0 ? num_rows : std::min(num_rows, static_cast<size_t>(max_rows));
  std::string text = absl::StrFormat("%8s %6s %10s %9s | %7s %7s %7s | %9s %9s %9s | %-6s %-6s\n",
                                     "s", "batch", "spilled", "measured", "logged", "replay",
                                     "best", "logged", "replay", "best", "logged", "replay");
  for (size_t i = 0; i < shown; ++i) {
    const ReplayRow& row = replay.rows[shown == num_rows ? i : i * num_rows / shown];
    absl::StrAppendFormat(
        &text,
        "%8.2f %6d %7.3fGiB %7.2fms | %7.3f %7.3f %7.3f | %7.2fms %7.2fms %7.2fms | %-6s %-6s\n",
        absl::ToDoubleSeconds(row.time - replay.rows.front().time), row.batch_size,
        static_cast<double>(row.spilled_bytes) / (1 << 30), row.measured_step_seconds * 1e3,
        row.logged_share, row.replayed_share, row.wanted_share, row.logged_seconds * 1e3,
        row.replayed_seconds * 1e3, row.wanted_seconds * 1e3, ActionName(row.logged_action),
        ActionName(row.replayed_action));
  }
  const Totals totals = Sum(replay.rows);
  const auto above_best = [&](double seconds) {
    return totals.wanted > 0 ? 100 * (seconds / totals.wanted - 1) : 0.0;
  };
  absl::StrAppendFormat(&text,
                        "%d decisions; pushes: %d logged, %d replayed\n"
                        "predicted step time above the best: %.2f %% logged, %.2f %% replayed\n"
                        "worst replayed step against the lowest share: %.3f\n",
                        num_rows, totals.logged_pushes, totals.replayed_pushes,
                        above_best(totals.logged), above_best(totals.replayed),
                        totals.worst_against_lowest);
  if (replay.bad_lines > 0) {
    absl::StrAppend(&text, replay.bad_lines,
                    " lines passed over; the first: ", replay.first_bad_line, "\n");
  }
  return text;
}

}  // namespace writescope::controller
