// Starts grpc::Server objects as this worker wants them. A Server answers all of its services on
// all of its ports, so what must stay apart (generation, control) gets one each.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace grpc {
class Server;
class Service;
}  // namespace grpc

namespace writescope::server {

struct GrpcServerOptions {
  std::string listen;  // host:port (port 0 takes a free one) or unix:path
  int64_t max_receive_bytes = int64_t{64} << 20;
  // Clients may ping a silent stream this often; gRPC's own default of 5 minutes cuts off anyone
  // who checks a long prefill's connection.
  absl::Duration min_client_ping_interval = absl::Seconds(5);
  // Our pings find clients whose machine is gone.
  absl::Duration keepalive_interval = absl::Seconds(60);
  absl::Duration keepalive_timeout = absl::Seconds(20);
  // Old connections end so that clients find new workers; running calls get the grace.
  absl::Duration max_connection_age = absl::Minutes(30);
  absl::Duration max_connection_age_grace = absl::Hours(24);
  int max_streams_per_connection = 1024;
};

// With health service (every name unknown but "", which serves) and reflection.
class GrpcServer {
 public:
  // UNAVAILABLE when the address cannot be had. The services outlive the server.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Create(
      const GrpcServerOptions& options, const std::vector<grpc::Service*>& services);
  ~GrpcServer();

  // With the port that was taken.
  const std::string& address() const { return address_; }
  void SetServing(const std::string& service, bool serving);
  // Closes the port; what still runs after `grace` is cut off. Only the first call counts.
  void Shutdown(absl::Duration grace);

 private:
  GrpcServer() = default;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  bool shut_down_ = false;
};

}  // namespace writescope::server
