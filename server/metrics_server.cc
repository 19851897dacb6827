#include "server/metrics_server.h"

#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/base/listen_error.h"
#include "prometheus/exposer.h"

namespace writescope::server {
namespace {

// Each connection holds a thread until its request has come in: those that say nothing must neither
// take all of them nor keep them, or scrapes would wait.
std::vector<std::string> ServerOptions(const std::string& listen) {
  return {"listening_ports", listen, "num_threads", "8", "request_timeout_ms", "1000"};
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Create(
    const std::string& listen, std::shared_ptr<prometheus::Collectable> metrics) {
  std::unique_ptr<MetricsServer> server(new MetricsServer());
  // The library throws when it cannot listen.
  try {
    server->exposer_ = std::make_unique<prometheus::Exposer>(ServerOptions(listen));
    server->exposer_->RegisterCollectable(metrics);
  } catch (const std::exception& error) {
    // Where the address is free, what the library says is all there is.
    const std::string why = WhyNotListening(listen);
    return absl::UnavailableError(absl::StrCat("cannot listen on ", listen,
                                               " for metrics: ", why.empty() ? error.what() : why));
  }
  server->metrics_ = std::move(metrics);
  const std::vector<int> ports = server->exposer_->GetListeningPorts();
  const std::string host = listen.substr(0, listen.rfind(':'));
  server->address_ = ports.empty() ? listen : absl::StrCat(host, ":", ports[0]);
  return server;
}

MetricsServer::~MetricsServer() = default;

}  // namespace writescope::server
