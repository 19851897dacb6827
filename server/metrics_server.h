// The worker's metrics over HTTP.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace prometheus {
class Collectable;
class Exposer;
}  // namespace prometheus

namespace writescope::server {

// /metrics over HTTP. Threads of its own, so a scrape does not wait for gRPC.
class MetricsServer {
 public:
  // `listen` is host:port; port 0 takes a free one. UNAVAILABLE when the address cannot be had.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Create(
      const std::string& listen, std::shared_ptr<prometheus::Collectable> metrics);
  ~MetricsServer();
  // With the port that was taken.
  const std::string& address() const { return address_; }

 private:
  MetricsServer() = default;
  std::unique_ptr<prometheus::Exposer> exposer_;
  // The exposer holds it weakly; this keeps it.
  std::shared_ptr<prometheus::Collectable> metrics_;
  std::string address_;
};

}  // namespace writescope::server
