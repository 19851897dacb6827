// Sizes and times as people write them on a command line.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace writescope::server {

// "1000", "40MiB", "1.5GiB", "32GB": bytes, with binary (KiB..TiB) or decimal (kB..TB) units.
// INVALID_ARGUMENT that names what is wrong; never negative.
absl::StatusOr<int64_t> ParseByteSize(std::string_view text);
// "12.3 GiB", "640 B": the largest binary unit that leaves at least 1.
std::string FormatByteSize(double bytes);

// "2s", "500ms", "1h30m", or a plain number of seconds. Not negative, and finite.
absl::StatusOr<absl::Duration> ParseTimeSpan(std::string_view text);
// The same, or "inf" for none.
absl::StatusOr<absl::Duration> ParseTimeLimit(std::string_view text);

// "0.3,0.75": two shares in [0, 1], the first not above the second.
struct ShareBounds {
  double min_share = 0;
  double max_share = 1;
};
absl::StatusOr<ShareBounds> ParseShareBounds(std::string_view text);

}  // namespace writescope::server
