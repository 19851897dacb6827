#include "server/grpc_server.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "engine/base/listen_error.h"
#include "grpc/health/v1/health.pb.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"

namespace writescope::server {
namespace {

int Milliseconds(absl::Duration duration) {
  constexpr int64_t kMax = std::numeric_limits<int>::max();
  return static_cast<int>(std::clamp<int64_t>(absl::ToInt64Milliseconds(duration), 1, kMax));
}

void SetArguments(const GrpcServerOptions& options, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(static_cast<int>(
      std::min<int64_t>(options.max_receive_bytes, std::numeric_limits<int>::max())));
  builder->SetMaxSendMessageSize(-1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                              Milliseconds(options.min_client_ping_interval));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(options.keepalive_interval));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                              Milliseconds(options.keepalive_timeout));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                              Milliseconds(options.max_connection_age));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS,
                              Milliseconds(options.max_connection_age_grace));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_streams_per_connection);
  // Two workers on one port would each get some of the calls; the second has to fail instead.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
}

// Whether a process listens on unix:path now. gRPC would take the path from it without a word, and
// whichever of the two ends first would remove it from under the other.
bool IsTaken(absl::string_view listen) {
  if (!absl::ConsumePrefix(&listen, "unix:")) return false;
  absl::ConsumePrefix(&listen, "//");
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (listen.size() >= sizeof(address.sun_path)) return false;  // gRPC refuses it.
  listen.copy(address.sun_path, listen.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool taken = connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return taken;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Create(
    const GrpcServerOptions& options, const std::vector<grpc::Service*>& services) {
  static std::once_flag once;
  std::call_once(once, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    // The library's health service has no description that reflection could give, so that grpcurl
    // could not call it. Naming ours links it.
    grpc::health::v1::HealthCheckRequest::descriptor();
  });
  if (IsTaken(options.listen)) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", options.listen, ": another process does"));
  }
  grpc::ServerBuilder builder;
  SetArguments(options, &builder);
  int port = 0;
  builder.AddListeningPort(options.listen, grpc::InsecureServerCredentials(), &port);
  for (grpc::Service* service : services) builder.RegisterService(service);
  std::unique_ptr<GrpcServer> server(new GrpcServer());
  server->server_ = builder.BuildAndStart();
  if (server->server_ == nullptr || port == 0) {
    const std::string why = WhyNotListening(options.listen);
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", options.listen, ": ", why.empty() ? "no reason" : why));
  }
  if (absl::StartsWith(options.listen, "unix:")) {
    server->address_ = options.listen;
  } else {
    server->address_ = absl::StrCat(options.listen.substr(0, options.listen.rfind(':')), ":", port);
  }
  return server;
}

GrpcServer::~GrpcServer() { Shutdown(absl::ZeroDuration()); }

void GrpcServer::SetServing(const std::string& service, bool serving) {
  if (server_ == nullptr) return;
  server_->GetHealthCheckService()->SetServingStatus(service, serving);
}

void GrpcServer::Shutdown(absl::Duration grace) {
  if (server_ == nullptr || std::exchange(shut_down_, true)) return;
  server_->Shutdown(absl::ToChronoTime(absl::Now() + grace));
  server_->Wait();
}

}  // namespace writescope::server
