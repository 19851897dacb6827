#include "server/cli/terminal.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace writescope::cli {

std::string Bar(double fraction, int width) {
  if (!(fraction >= 0)) fraction = 0;
  fraction = std::min(fraction, 1.0);
  const int filled = static_cast<int>(std::lround(fraction * width));
  return absl::StrCat("[", std::string(static_cast<size_t>(filled), '#'),
                      std::string(static_cast<size_t>(width - filled), '.'), "]");
}

std::string FormatRate(double bytes_per_s) {
  if (!std::isfinite(bytes_per_s) || bytes_per_s <= 0) return "-";
  if (bytes_per_s >= 1e9) return absl::StrFormat("%.1f GB/s", bytes_per_s / 1e9);
  if (bytes_per_s >= 1e6) return absl::StrFormat("%.1f MB/s", bytes_per_s / 1e6);
  return absl::StrFormat("%.1f kB/s", bytes_per_s / 1e3);
}

std::string FormatSpan(absl::Duration span) {
  const double seconds = absl::ToDoubleSeconds(span);
  if (!std::isfinite(seconds)) return "-";
  if (seconds >= 100) return absl::FormatDuration(absl::Seconds(std::llround(seconds)));
  if (seconds >= 1) return absl::StrFormat("%.1fs", seconds);
  return absl::StrFormat("%.1fms", seconds * 1e3);
}

std::string FormatPercent(double fraction) {
  if (!std::isfinite(fraction)) return "-";
  return absl::StrFormat("%.0f%%", fraction * 100);
}

ProgressLine::ProgressLine() : terminal_(isatty(STDERR_FILENO) != 0) {}

void ProgressLine::Show(double fraction, const std::string& text) {
  constexpr int kBarWidth = 30;
  const absl::Time now = absl::Now();
  if (now - last_ < (terminal_ ? absl::Milliseconds(100) : absl::Seconds(5))) return;
  last_ = now;
  if (terminal_) {
    std::fprintf(stderr, "\r\033[K%s %s", Bar(fraction, kBarWidth).c_str(), text.c_str());
    shown_ = true;
  } else {
    std::fprintf(stderr, "%s\n", text.c_str());
  }
  std::fflush(stderr);
}

void ProgressLine::Clear() {
  if (!shown_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  shown_ = false;
}

bool StdoutIsTerminal() { return isatty(STDOUT_FILENO) != 0; }

}  // namespace writescope::cli
