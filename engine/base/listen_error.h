// Why an address cannot be listened on: gRPC and the metrics' web server only say that it did not
// work.
#pragma once

#include <string>

namespace writescope {

// `address` is host:port or unix:path. Tries to bind it and leaves nothing behind: "Address already
// in use", "No such file or directory", and what else the system says. Empty when it can be bound.
std::string WhyNotListening(const std::string& address);

}  // namespace writescope
