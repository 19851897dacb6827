// writescope share: the share table in force, and an operator's own.
#pragma once

#include "server/cli/client.h"

namespace writescope::cli {

int RunShareShow(const ClientOptions& client);

struct ShareSetFlags {
  double share = 0;
  absl::Duration valid_for = absl::Minutes(1);
  // Speaks in the name of whoever holds the lease, who then stands by until this one ends.
  bool take_over = false;
};
int RunShareSet(const ClientOptions& client, const ShareSetFlags& flags);

// Ends the lease: an operator's own, or with `take_over` anyone's.
int RunShareRelease(const ClientOptions& client, bool take_over);

// The pace of a simulated link, in bytes per second; 0 takes it off.
int RunLinkPace(const ClientOptions& client, double bytes_per_s);

}  // namespace writescope::cli
