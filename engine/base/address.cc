#include "engine/base/address.h"

#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace writescope {
namespace {

bool HasPort(absl::string_view address, int least_port) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) return false;
  const absl::string_view host = address.substr(0, colon);
  const bool bracketed = host.front() == '[' && host.back() == ']';
  // gRPC takes ::1:50051 for a host, and 443 for its port.
  if (absl::StrContains(host, ':') && !bracketed) return false;
  int port = -1;
  return absl::SimpleAtoi(address.substr(colon + 1), &port) && port >= least_port && port <= 65535;
}

// The path of unix:path; nothing where it is another kind of address.
std::optional<absl::string_view> UnixPath(absl::string_view address) {
  if (!absl::ConsumePrefix(&address, "unix:")) return std::nullopt;
  return address;
}

}  // namespace

std::string CheckListenAddress(const std::string& address) {
  if (HasPort(address, 0)) return "";
  return absl::StrCat("'", address, "' is not host:port with a port in [0, 65535]");
}

std::string CheckListenAddressOrPath(const std::string& address) {
  if (const auto path = UnixPath(address); path.has_value() && !path->empty()) return "";
  const std::string wrong = CheckListenAddress(address);
  return wrong.empty() ? "" : absl::StrCat(wrong, ", nor unix:path");
}

std::string CheckServerAddress(const std::string& address) {
  if (const auto path = UnixPath(address); path.has_value() && !path->empty()) return "";
  absl::string_view rest = address;
  for (const absl::string_view resolver : {"dns:", "ipv4:", "ipv6:", "unix-abstract:", "xds:"}) {
    // What follows is the resolver's own: an authority, several addresses, a name without a port.
    if (absl::ConsumePrefix(&rest, resolver) && !absl::StripPrefix(rest, "//").empty()) return "";
  }
  if (HasPort(address, 1)) return "";
  return absl::StrCat("'", address,
                      "' is not host:port with a port in [1, 65535], nor unix:path, nor an address "
                      "of gRPC's such as dns:///name:port");
}

}  // namespace writescope
