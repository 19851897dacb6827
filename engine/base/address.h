// Addresses as flags give them. Each function is empty, or says what is wrong with the text. What
// is typed wrong would else be an address where nobody answers, for as long as one cares to wait.
#pragma once

#include <string>

namespace writescope {

// Where a server is to listen: host:port with a port in [0, 65535], 0 being any free one. A host
// with colons stands in brackets, as in [::1]:50051.
std::string CheckListenAddress(const std::string& address);
// The same, or unix:path.
std::string CheckListenAddressOrPath(const std::string& address);

// Where a gRPC server is to be found: host:port with a port in [1, 65535], unix:path, or the name
// that another of gRPC's resolvers takes, such as dns:///name:port.
std::string CheckServerAddress(const std::string& address);

}  // namespace writescope
