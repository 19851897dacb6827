// writescope-worker's services with a FakeEngine behind them: --port=N for generation (0: a free
// one). Prints LISTENING and READY as the worker does, and drains on SIGTERM.
#include <csignal>
#include <cstdio>
#include <string>

#include "server/worker.h"
#include "tests/support/fake_engine.h"

namespace writescope::server {
namespace {

int Main(int argc, char** argv) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  testing_support::FakeEngineOptions fake;
  fake.step = absl::Milliseconds(20);
  fake.default_max_tokens = 64;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const std::string chat_template = "--chat-template=";
    if (flag == "--echo") fake.echo = true;
    if (flag.rfind(chat_template, 0) == 0) fake.chat_template = flag.substr(chat_template.size());
  }
  WorkerConfig config;
  config.engine.model_dir = "fake";
  config.listen = config.control_listen = config.metrics_listen = "127.0.0.1:0";
  Worker worker(config);
  if (const absl::Status status = worker.Listen(); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  std::printf("LISTENING generation=%s control=%s metrics=%s\n",
              worker.generation_address().c_str(), worker.control_address().c_str(),
              worker.metrics_address().c_str());
  const absl::Status loaded = worker.Load(
      [&](const runtime::EngineOptions& options,
          runtime::EngineObserver* observer) -> absl::StatusOr<std::unique_ptr<runtime::Engine>> {
        return std::make_unique<testing_support::FakeEngine>(options, fake, observer);
      });
  if (!loaded.ok()) return 1;
  std::printf("READY\n");
  std::fflush(stdout);
  int signal = 0;
  sigwait(&signals, &signal);
  worker.Drain([] { return true; });
  return 0;
}

}  // namespace
}  // namespace writescope::server

int main(int argc, char** argv) { return writescope::server::Main(argc, argv); }
