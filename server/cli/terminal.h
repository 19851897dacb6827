// Bars and progress for a terminal, plain lines for everything else.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"

namespace writescope::cli {

// "[#####.....]", with `fraction` of `width` filled; NaN and what is out of range are moved into
// it.
std::string Bar(double fraction, int width);

// "1.2 GB/s"; "-" when there is nothing to say.
std::string FormatRate(double bytes_per_s);
// "3m12s", "8.2s", "41ms".
std::string FormatSpan(absl::Duration span);
std::string FormatPercent(double fraction);

// One line on stderr that is redrawn on a terminal, and printed now and then elsewhere.
class ProgressLine {
 public:
  ProgressLine();
  // Drawn at most ten times a second on a terminal, else a line every five seconds.
  void Show(double fraction, const std::string& text);
  // Takes the line off the terminal.
  void Clear();

 private:
  const bool terminal_;
  bool shown_ = false;
  absl::Time last_ = absl::InfinitePast();
};

bool StdoutIsTerminal();

}  // namespace writescope::cli
