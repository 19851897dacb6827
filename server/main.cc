// writescope-worker: flags, wiring, signals.
#include <semaphore.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/process.h"
#include "engine/runtime/engine.h"
#include "server/config.h"
#include "server/version.h"
#include "server/worker.h"

namespace writescope::server {
namespace {

// Exit codes: 0 after a drain, 1 for a start that failed, 2 for wrong flags, 3 for an engine that
// failed, 4 for one that got stuck.
enum ExitCode { kExitOk = 0, kExitStart = 1, kExitEngineFailed = 3, kExitEngineStuck = 4 };

// Counts the signals to stop that came in. A handler, since blocked signals would not do: a library
// may start threads before main (OpenBLAS does), and one that does not block them would die of
// them. The default action would not do either: the kernel spares a container's first process.
sem_t stop_signals;
// Until somebody waits for them. Reading the checkpoint's headers may hang with its file system.
std::atomic<bool> stop_at_once{true};
static_assert(std::atomic<bool>::is_always_lock_free);

void OnStopSignal(int) {
  if (stop_at_once.load()) _exit(kExitOk);
  sem_post(&stop_signals);
}

void CatchStopSignals() {
  sem_init(&stop_signals, 0, 0);
  struct sigaction action = {};
  action.sa_handler = OnStopSignal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
}

// Whether a signal to stop came in, waiting for it at most this long.
bool StopSignalWithin(absl::Duration duration) {
  timespec until = {};
  clock_gettime(CLOCK_MONOTONIC, &until);
  until = absl::ToTimespec(absl::DurationFromTimespec(until) + duration);
  while (sem_clockwait(&stop_signals, CLOCK_MONOTONIC, &until) != 0) {
    if (errno != EINTR) return false;
  }
  return true;
}

int FailedStart(const absl::Status& status) {
  Log(LogLevel::kError, "the worker cannot start", {{"error", status.ToString()}});
  return kExitStart;
}

// Makes the engine, which takes minutes for a large model. Nothing is served yet, so a signal to
// stop ends the process on the spot.
absl::Status LoadInterruptibly(Worker& worker) {
  absl::Status status;
  std::atomic<bool> loaded{false};
  std::thread loader([&] {
    status = worker.Load(runtime::Engine::Create);
    loaded.store(true);
  });
  while (!loaded.load()) {
    if (!StopSignalWithin(absl::Milliseconds(20))) continue;
    Log(LogLevel::kInfo, "stopped while loading");
    _exit(kExitOk);
  }
  loader.join();
  return status;
}

int Serve(Worker& worker) {
  int exit_code = kExitOk;
  while (!StopSignalWithin(absl::Milliseconds(500))) {
    const absl::Status status = worker.CheckEngine(Clock::Real().Now());
    if (status.ok()) continue;
    Log(LogLevel::kError, "giving up", {{"error", status.ToString()}});
    if (absl::IsDeadlineExceeded(status)) _exit(kExitEngineStuck);
    exit_code = kExitEngineFailed;
    break;
  }
  worker.Drain([] { return !StopSignalWithin(absl::ZeroDuration()); });
  return exit_code;
}

int Main(int argc, char** argv) {
  PrepareProcess();
  CatchStopSignals();

  ParsedConfig parsed = ParseWorkerConfig(std::vector<std::string>(argv + 1, argv + argc));
  if (!parsed.config.has_value()) {
    std::fputs(parsed.message.c_str(), parsed.exit_code == 0 ? stdout : stderr);
    return parsed.exit_code == 0 && !StdoutTaken() ? kExitStart : parsed.exit_code;
  }
  const WorkerConfig& config = *parsed.config;
  SetLogLevel(config.log_level);

  const absl::StatusOr<runtime::MemoryPlan> plan = runtime::Engine::Plan(config.engine);
  if (!plan.ok()) return FailedStart(plan.status());
  std::printf("%s\n", plan->ToString().c_str());
  std::fflush(stdout);
  if (config.plan_only) return StdoutTaken() ? kExitOk : kExitStart;

  stop_at_once.store(false);
  Worker worker(config);
  if (const absl::Status status = worker.Listen(); !status.ok()) return FailedStart(status);
  // For scripts: one line each, in this form.
  std::printf("LISTENING generation=%s control=%s metrics=%s\n",
              worker.generation_address().c_str(), worker.control_address().c_str(),
              worker.metrics_address().c_str());
  std::fflush(stdout);
  const absl::Time start = Clock::Real().Now();
  if (const absl::Status status = LoadInterruptibly(worker); !status.ok()) {
    return FailedStart(status);
  }
  std::printf("READY\n");
  std::fflush(stdout);
  Log(LogLevel::kInfo, "serving",
      {{"version", kVersion},
       {"model", config.engine.model_dir},
       {"generation", worker.generation_address()},
       {"load_seconds", absl::ToDoubleSeconds(Clock::Real().Now() - start)}});
  return Serve(worker);
}

}  // namespace
}  // namespace writescope::server

int main(int argc, char** argv) { return writescope::server::Main(argc, argv); }
