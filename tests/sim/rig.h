// A simulated worker and controllers on one FakeClock.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "controller/control_loop.h"
#include "engine/base/clock.h"
#include "tests/sim/simulated_worker.h"

namespace writescope::sim {

inline controller::ControlOptions LoopOptions(const std::string& id = "a") {
  controller::ControlOptions options;
  options.controller_id = id;
  return options;
}

class Rig {
 public:
  explicit Rig(const SimulatedWorker::Options& options = {})
      : clock(absl::FromUnixSeconds(1700000000)), worker(clock, options) {}

  // A controller process; `Kill` it and it never acts again.
  controller::ControlLoop& Start(const controller::ControlOptions& options,
                                 controller::ControlObserver* observer = nullptr,
                                 controller::DecisionLog* log = nullptr) {
    auto process = std::make_unique<Process>();
    process->client = worker.Connect();
    process->loop =
        std::make_unique<controller::ControlLoop>(options, *process->client, clock, observer, log);
    processes_.push_back(std::move(process));
    return *processes_.back()->loop;
  }
  void Kill(const controller::ControlLoop& loop) {
    std::erase_if(processes_, [&](const auto& process) { return process->loop.get() == &loop; });
  }

  void RunFor(absl::Duration duration) {
    const absl::Time end = clock.Now() + duration;
    while (clock.Now() < end) RunOnce();
  }
  // Every controller has a turn, or time passes without one.
  void RunOnce() {
    for (const auto& process : processes_) process->loop->Tick();
    if (processes_.empty()) {
      if (idle_ == nullptr) idle_ = worker.Connect();
      idle_->WatchSteps(absl::Milliseconds(250));
    }
  }

  FakeClock clock;
  SimulatedWorker worker;

 private:
  struct Process {
    std::unique_ptr<controller::WorkerClient> client;
    std::unique_ptr<controller::ControlLoop> loop;
  };
  std::vector<std::unique_ptr<Process>> processes_;
  std::unique_ptr<controller::WorkerClient> idle_;
};

}  // namespace writescope::sim
