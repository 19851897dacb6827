#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "prometheus/exposer.h"
#include "server/metrics.h"

namespace writescope::server {

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Create(
    const std::string& listen, std::shared_ptr<prometheus::Collectable> metrics) {
  constexpr int kThreads = 2;
  std::unique_ptr<MetricsServer> server(new MetricsServer());
  // The library throws when it cannot listen.
  try {
    server->exposer_ = std::make_unique<prometheus::Exposer>(listen, kThreads);
    server->exposer_->RegisterCollectable(metrics);
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", listen, " for metrics: ", error.what()));
  }
  server->metrics_ = std::move(metrics);
  const std::vector<int> ports = server->exposer_->GetListeningPorts();
  const std::string host = listen.substr(0, listen.rfind(':'));
  server->address_ = ports.empty() ? listen : absl::StrCat(host, ":", ports[0]);
  return server;
}

MetricsServer::~MetricsServer() = default;

}  // namespace writescope::server
