#include "engine/base/listen_error.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace writescope {
namespace {

std::string WhyNotBound(const sockaddr* address, socklen_t address_bytes) {
  const int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return std::strerror(errno);
  // As the servers do: a port whose last connections have just ended is free.
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  std::string why;
  if (bind(fd, address, address_bytes) != 0 || ::listen(fd, 1) != 0) why = std::strerror(errno);
  close(fd);
  return why;
}

std::string WhyNotListeningUnix(absl::string_view path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  constexpr size_t kMaxPathBytes = sizeof(address.sun_path) - 1;
  if (path.size() > kMaxPathBytes) {
    return absl::StrCat("the path has ", path.size(), " bytes, a socket's at most ", kMaxPathBytes);
  }
  path.copy(address.sun_path, path.size());
  std::string why = WhyNotBound(reinterpret_cast<sockaddr*>(&address), sizeof(address));
  if (why.empty()) unlink(address.sun_path);
  return why;
}

}  // namespace

std::string WhyNotListening(const std::string& address) {
  absl::string_view listen = address;
  if (absl::ConsumePrefix(&listen, "unix:")) {
    absl::ConsumePrefix(&listen, "//");
    return WhyNotListeningUnix(listen);
  }
  const size_t colon = listen.rfind(':');
  if (colon == absl::string_view::npos) return "it has no port";
  absl::string_view host = listen.substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  addrinfo hints = {};
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* addresses = nullptr;
  const int error = getaddrinfo(std::string(host).c_str(),
                                std::string(listen.substr(colon + 1)).c_str(), &hints, &addresses);
  if (error != 0) return gai_strerror(error);
  const auto free_addresses = absl::MakeCleanup([addresses] { freeaddrinfo(addresses); });
  for (const addrinfo* it = addresses; it != nullptr; it = it->ai_next) {
    std::string why = WhyNotBound(it->ai_addr, it->ai_addrlen);
    if (!why.empty()) return why;
  }
  return "";
}

}  // namespace writescope
