// The engine thread: takes requests in, chooses and runs steps, gives tokens out.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "engine/base/clock.h"
#include "engine/runtime/active_request.h"
#include "engine/runtime/cpu_share_slot.h"
#include "engine/runtime/engine.h"
#include "engine/runtime/model_runner.h"
#include "engine/runtime/resident_pacer.h"
#include "engine/runtime/scheduler.h"
#include "engine/runtime/step_model.h"
#include "engine/runtime/step_planner.h"
#include "engine/runtime/worker_tuner.h"

namespace writescope::runtime {

// Start, Post, Wake, Stop and state are thread-safe; everything else is the engine thread's.
class StepLoop {
 public:
  // All references must outlive the loop. `on_end` is called by the engine thread when a request is
  // gone.
  StepLoop(const EngineOptions& options, ModelRunner& runner, device::Device& device,
           CpuShareSlot& share, StepModel model, EngineObserver* observer,
           std::function<void(const ActiveRequest&)> on_end);
  ~StepLoop();

  void Start();
  // False once the loop has stopped or failed; the request is left with the caller then.
  bool Post(std::unique_ptr<ActiveRequest>& request);
  // Something of a request has changed (it was cancelled): look now.
  void Wake();
  // Ends every request with UNAVAILABLE, and the thread.
  void Stop();
  EngineState state() const;
  absl::Time last_heartbeat() const {
    return absl::FromUnixNanos(heartbeat_ns_.load(std::memory_order_relaxed));
  }

 private:
  using Requests = std::vector<std::unique_ptr<ActiveRequest>>;

  void WakeLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run();
  void Beat();
  void TakeInbox();
  // Requests that were cancelled, aborted, are past their time, or whose reader is too slow.
  void EndAskedFor();
  std::optional<absl::Status> ReasonToEnd(ActiveRequest& request, absl::Time now);
  void Admit();
  void ResumePaused();
  void StartPrompt(ActiveRequest& request);
  bool RunChosenStep();
  void RunPrefill(const std::vector<ActiveRequest*>& requests,
                  const std::vector<int64_t>& num_tokens);
  void RunDecode(const std::vector<ActiveRequest*>& requests);
  void RunHybrid(const std::vector<ActiveRequest*>& requests,
                 const std::vector<ActiveRequest*>& resident);
  bool RunResident(const std::vector<ActiveRequest*>& requests);
  // Resident sequences step inside a hybrid step, in time that would be idle.
  void StepResidentBetween(std::vector<ActiveRequest*>& resident, ResidentPacer& pacer,
                           const std::function<bool()>& still_waiting);
  // The share, and whether the step is one of two micro-batches.
  void PlanHybrid(std::span<const int> slots, StepOptions* options, StepStats* stats);
  // What a hybrid step has shown.
  void LearnFrom(const StepResult& result, int batch_size, double predicted_s, double step_s);
  // Ends those of a step that have been read and are to generate nothing. A prompt of one token
  // takes a step like those of answers.
  void FinishWithoutTokens(const std::vector<ActiveRequest*>& requests);
  void TakeLogits(const std::vector<ActiveRequest*>& requests, int slice, int64_t position,
                  const RowLogits& logits);
  // After a failed step: pauses, drops or fails what it takes to go on.
  void HandleStepError(const std::vector<ActiveRequest*>& requests, const absl::Status& status,
                       int full_slice);
  void MakeRoom(const std::vector<ActiveRequest*>& requests);
  void FinishEnded();
  void End(ActiveRequest& request, const absl::Status& status);
  void ReportStep(StepKind kind, int64_t prefill_tokens, const attention::AttentionStats& attention,
                  double step_seconds, int batch_size, StepStats stats);
  void ReportProgress();
  // Adds to the totals what a request has read and generated since the last call.
  void CountTokens(ActiveRequest& request);
  void PublishCounts();
  void PublishState();
  void FailEngine(const absl::Status& status);
  void EndAll(const absl::Status& status);
  int64_t Pending(const ActiveRequest& request) const;

  const EngineOptions options_;
  ModelRunner& runner_;
  device::Device& device_;
  CpuShareSlot& share_;
  EngineObserver* const observer_;
  const std::function<void(const ActiveRequest&)> on_end_;
  Clock& clock_ = Clock::Real();

  mutable std::mutex mutex_;
  std::condition_variable woken_;  // wake_ has been set
  Requests inbox_ ABSL_GUARDED_BY(mutex_);
  bool wake_ ABSL_GUARDED_BY(mutex_) = false;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;  // Nothing enters any more
  EngineState published_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int64_t> heartbeat_ns_{0};

  // Engine thread.
  std::deque<std::unique_ptr<ActiveRequest>> waiting_;
  Requests running_;  // In order of arrival; paused ones among them
  absl::flat_hash_map<RequestId, absl::Status> errors_;  // Of requests that end after this step
  EngineState state_;
  StepPlanner planner_;
  WorkerTuner tuner_;
  StepTurns turns_;
  bool hybrid_running_ = false;  // Inside ModelRunner::Run of a decode step
  std::thread thread_;
};

}  // namespace writescope::runtime
