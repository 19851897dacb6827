// Where the services find the engine: nothing while it loads, refused while the worker drains.
#pragma once

#include <atomic>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/runtime/engine.h"
#include "engine/runtime/error_reason.h"

namespace writescope::server {

enum class Phase { kStarting, kServing, kDraining, kFailed };

inline const char* PhaseName(Phase phase) {
  switch (phase) {
    case Phase::kStarting:
      return "starting";
    case Phase::kServing:
      return "serving";
    case Phase::kDraining:
      return "draining";
    case Phase::kFailed:
      return "failed";
  }
  return "unknown";
}

// Thread-safe. Does not own the engine, which has to outlive every call that may use it.
class EngineSlot {
 public:
  void Set(runtime::Engine* engine) { engine_.store(engine); }
  void SetPhase(Phase phase) { phase_.store(phase); }
  Phase phase() const { return phase_.load(); }

  // The engine, or null while it loads.
  runtime::Engine* engine() const { return engine_.load(); }

  // UNAVAILABLE, reason LOADING.
  absl::StatusOr<runtime::Engine*> Get() const {
    runtime::Engine* const engine = engine_.load();
    if (engine != nullptr) return engine;
    return runtime::WithReason(absl::UnavailableError("the model is being loaded"), "LOADING");
  }
  // For new work: DRAINING and ENGINE_FAILED as well.
  absl::StatusOr<runtime::Engine*> GetForNewWork() const {
    switch (phase_.load()) {
      case Phase::kDraining:
        return runtime::WithReason(
            absl::UnavailableError("the worker is shutting down; another one can take the request"),
            "DRAINING");
      case Phase::kFailed:
        return runtime::WithReason(absl::UnavailableError("the engine has failed"),
                                   "ENGINE_FAILED");
      case Phase::kStarting:
      case Phase::kServing:
        break;
    }
    return Get();
  }

 private:
  std::atomic<runtime::Engine*> engine_{nullptr};
  std::atomic<Phase> phase_{Phase::kStarting};
};

}  // namespace writescope::server
