// writescope share: the share table in force, and an operator's own.
#pragma once

#include "server/cli/client.h"

namespace writescope::cli {

int RunShareShow(const ClientOptions& client);

struct ShareSetFlags {
  double share = 0;
  absl::Duration valid_for = absl::Minutes(1);
};
// Goes before any controller, which stands by until the lease ends.
int RunShareSet(const ClientOptions& client, const ShareSetFlags& flags);

// Ends an operator's lease; a controller may then offer a table again.
int RunShareRelease(const ClientOptions& client);

// The pace of a simulated link, in bytes per second; 0 takes it off.
int RunLinkPace(const ClientOptions& client, double bytes_per_s);

}  // namespace writescope::cli
