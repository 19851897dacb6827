// writescope-controller: flags, wiring, signals.
#include <prometheus/registry.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "controller/config.h"
#include "controller/control_loop.h"
#include "controller/decision_log.h"
#include "controller/metrics.h"
#include "controller/metrics_server.h"
#include "controller/version.h"
#include "controller/worker_client.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/process.h"

namespace writescope::controller {
namespace {

int FailedStart(const absl::Status& status) {
  Log(LogLevel::kError, "the controller cannot start", {{"error", status.ToString()}});
  return 1;
}

int Main(int argc, char** argv) {
  PrepareProcess();
  // Before any thread starts, so that all of them leave the signals to this one.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  const ParsedConfig parsed = ParseConfig(std::vector<std::string>(argv + 1, argv + argc));
  if (!parsed.config.has_value()) {
    std::fputs(parsed.message.c_str(), parsed.exit_code == 0 ? stdout : stderr);
    return parsed.exit_code == 0 && !StdoutTaken() ? 1 : parsed.exit_code;
  }
  const Config& config = *parsed.config;
  SetLogLevel(config.log_level);

  std::unique_ptr<DecisionLog> decision_log;
  if (!config.decision_log.empty()) {
    auto opened = DecisionLog::Create(config.decision_log, config.decision_log_bytes);
    if (!opened.ok()) return FailedStart(opened.status());
    decision_log = *std::move(opened);
  }
  const auto registry = std::make_shared<prometheus::Registry>();
  Metrics metrics(*registry, kVersion, config.control.controller_id);
  const auto metrics_server = MetricsServer::Create(config.metrics_listen, registry);
  if (!metrics_server.ok()) return FailedStart(metrics_server.status());

  GrpcWorkerClientOptions client_options;
  client_options.address = config.worker_address;
  GrpcWorkerClient client(client_options);
  ControlLoop loop(config.control, client, Clock::Real(), &metrics, decision_log.get());
  // For scripts: in this form.
  std::printf("LISTENING metrics=%s\n", (*metrics_server)->address().c_str());
  std::fflush(stdout);
  Log(LogLevel::kInfo, "controlling",
      {{"version", kVersion},
       {"worker", config.worker_address},
       {"controller_id", config.control.controller_id},
       {"metrics", (*metrics_server)->address()},
       {"lease", absl::FormatDuration(config.control.lease)},
       {"shadow", config.control.shadow}});

  std::atomic<bool> stop{false};
  std::thread control([&] { loop.Run(stop); });
  int signal_number = 0;
  sigwait(&signals, &signal_number);
  stop.store(true);
  client.Stop();  // The lease is left to run out, or to the next controller of this name.
  control.join();
  Log(LogLevel::kInfo, "stopped",
      {{"signal", signal_number},
       {"decisions", loop.status().decisions},
       {"generation", loop.status().own_generation}});
  return 0;
}

}  // namespace
}  // namespace writescope::controller

int main(int argc, char** argv) { return writescope::controller::Main(argc, argv); }
