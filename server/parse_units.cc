#include "server/parse_units.h"

#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "engine/base/status_macros.h"

namespace writescope::server {
namespace {

struct Unit {
  std::string_view name;
  double bytes;
};
constexpr std::array<Unit, 9> kUnits = {{{"B", 1},
                                         {"KiB", 1024.0},
                                         {"MiB", 1048576.0},
                                         {"GiB", 1073741824.0},
                                         {"TiB", 1099511627776.0},
                                         {"kB", 1e3},
                                         {"MB", 1e6},
                                         {"GB", 1e9},
                                         {"TB", 1e12}}};

absl::Status Bad(std::string_view what, std::string_view text, std::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat(std::string(what), " '", std::string(text),
                                                 "': expected ", std::string(expected)));
}

}  // namespace

absl::StatusOr<int64_t> ParseByteSize(std::string_view text) {
  constexpr std::string_view kExpected =
      "a number of bytes such as 1073741824, 40MiB, 1.5GiB or 32GB";
  const size_t split = text.find_first_not_of("0123456789.");
  const std::string number(text.substr(0, split));
  const std::string_view suffix = split == std::string_view::npos ? "" : text.substr(split);
  double value = 0;
  if (number.empty() || !absl::SimpleAtod(number, &value)) return Bad("size", text, kExpected);
  double factor = 0;
  if (suffix.empty()) {
    if (number.find('.') != std::string::npos) return Bad("size", text, kExpected);
    factor = 1;
  }
  for (const Unit& unit : kUnits) {
    if (suffix == unit.name) factor = unit.bytes;
  }
  if (factor == 0) {
    return Bad(
        "size", text,
        absl::StrCat(std::string(kExpected), "; there is no unit '", std::string(suffix), "'"));
  }
  const double bytes = value * factor;
  if (!(bytes < 9e18)) return Bad("size", text, "less than 8 EiB");
  return static_cast<int64_t>(std::llround(bytes));
}

std::string FormatByteSize(double bytes) {
  constexpr std::array<const char*, 5> kNames = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (std::abs(bytes) >= 1024 && unit + 1 < kNames.size()) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? absl::StrFormat("%.0f B", bytes)
                   : absl::StrFormat("%.1f %s", bytes, kNames[unit]);
}

absl::StatusOr<absl::Duration> ParseTimeLimit(std::string_view text) {
  absl::Duration span;
  double seconds = 0;
  const std::string copy(text);
  if (absl::SimpleAtod(copy, &seconds) && std::isfinite(seconds)) {
    span = absl::Seconds(seconds);
  } else if (!absl::ParseDuration(copy, &span)) {
    return Bad("time", text, "a time such as 500ms, 2s, 1h30m, or a number of seconds");
  }
  if (span < absl::ZeroDuration()) return Bad("time", text, "a time that is not negative");
  return span;
}

absl::StatusOr<absl::Duration> ParseTimeSpan(std::string_view text) {
  ASSIGN_OR_RETURN(const absl::Duration span, ParseTimeLimit(text));
  if (span == absl::InfiniteDuration()) return Bad("time", text, "a finite time");
  return span;
}

absl::StatusOr<ShareBounds> ParseShareBounds(std::string_view text) {
  constexpr std::string_view kExpected =
      "two shares in [0, 1] in ascending order, such as 0.3,0.75";
  const std::vector<std::string> parts = absl::StrSplit(std::string(text), ',');
  ShareBounds bounds;
  if (parts.size() != 2 || !absl::SimpleAtod(parts[0], &bounds.min_share) ||
      !absl::SimpleAtod(parts[1], &bounds.max_share)) {
    return Bad("share interval", text, kExpected);
  }
  if (!(bounds.min_share >= 0 && bounds.min_share <= bounds.max_share && bounds.max_share <= 1)) {
    return Bad("share interval", text, kExpected);
  }
  return bounds;
}

}  // namespace writescope::server
