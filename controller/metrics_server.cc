#include "controller/metrics_server.h"

#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <prometheus/metric_family.h>

#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/base/listen_error.h"

namespace writescope::controller {
namespace {

// The answer is its status; it has no series of its own.
class Health final : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override { return {}; }
};

// Each connection holds a thread until its request has come in: those that say nothing must neither
// take all of them nor keep them, or scrapes and probes would wait.
std::vector<std::string> ServerOptions(const std::string& listen) {
  return {"listening_ports", listen, "num_threads", "8", "request_timeout_ms", "1000"};
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Create(
    const std::string& listen, std::shared_ptr<prometheus::Collectable> metrics) {
  std::unique_ptr<MetricsServer> server(new MetricsServer());
  server->metrics_ = std::move(metrics);
  server->health_ = std::make_shared<Health>();
  // The library throws when it cannot listen.
  try {
    server->exposer_ = std::make_unique<prometheus::Exposer>(ServerOptions(listen));
    server->exposer_->RegisterCollectable(server->metrics_, "/metrics");
    server->exposer_->RegisterCollectable(server->health_, "/healthz");
  } catch (const std::exception& error) {
    const std::string why = WhyNotListening(listen);
    return absl::UnavailableError(absl::StrCat("cannot listen on ", listen,
                                               " for metrics: ", why.empty() ? error.what() : why));
  }
  const std::vector<int> ports = server->exposer_->GetListeningPorts();
  server->address_ =
      ports.empty() ? listen : absl::StrCat(listen.substr(0, listen.rfind(':')), ":", ports[0]);
  return server;
}

MetricsServer::~MetricsServer() = default;

}  // namespace writescope::controller
