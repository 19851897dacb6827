// Metrics over HTTP: /metrics for Prometheus, and /healthz, which answers 200 as long as the
// process lives, worker or not.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace prometheus {
class Collectable;
class Exposer;
}  // namespace prometheus

namespace writescope::controller {

class MetricsServer {
 public:
  // `listen` is host:port; port 0 takes a free one. UNAVAILABLE when it cannot be had.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Create(
      const std::string& listen, std::shared_ptr<prometheus::Collectable> metrics);
  ~MetricsServer();

  // With the port that was taken.
  const std::string& address() const { return address_; }

 private:
  MetricsServer() = default;

  std::string address_;
  // Ours as well as the caller's: the exposer only holds weak pointers.
  std::shared_ptr<prometheus::Collectable> metrics_;
  std::shared_ptr<prometheus::Collectable> health_;
  std::unique_ptr<prometheus::Exposer> exposer_;
};

}  // namespace writescope::controller
