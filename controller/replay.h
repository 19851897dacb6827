// Replay: the decisions of a log made again, with other settings, from the same measurements.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "controller/policy.h"

namespace writescope::controller {

struct ReplayRow {
  absl::Time time;
  uint32_t batch_size = 0;
  uint64_t spilled_bytes = 0;
  double measured_step_seconds = 0;
  double logged_share = 0;
  double replayed_share = 0;
  double wanted_share = 0;
  // By the roofline with the rates of that moment.
  double logged_seconds = 0;
  double replayed_seconds = 0;
  double wanted_seconds = 0;
  double lowest_seconds = 0;
  Action logged_action = Action::kHold;
  Action replayed_action = Action::kHold;
};

struct Replay {
  std::vector<ReplayRow> rows;
  int bad_lines = 0;
  std::string first_bad_line;  // What was wrong with it.
};

// Bad lines are passed over and counted: a log may end in the middle of one.
// INVALID_ARGUMENT when no line is good.
absl::StatusOr<Replay> ReplayLog(std::istream& log, const PolicyOptions& options);

// A table with at most `max_rows` rows (0: all), and a summary.
std::string FormatReplay(const Replay& replay, int max_rows);

}  // namespace writescope::controller
