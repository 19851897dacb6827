// An engine without a model: answers every prompt with a script, one event a step, so that the
// server can be tested by itself. Follows the contract of runtime::Engine.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/runtime/engine.h"

namespace writescope::testing_support {

struct FakeEngineOptions {
  absl::Duration step = absl::Milliseconds(2);
  int prefill_steps = 3;
  // The answer, a token each, over and over until max_tokens.
  std::vector<std::string> words = {"the ", "sky ", "is ", "blue. "};
  int default_max_tokens = 16;
  int max_queue = 4;
  int max_sequences = 4;
  int max_context_tokens = 1 << 23;
  bool has_tokenizer = true;
  std::string chat_template;
  // Answers a text prompt with itself, special segments in braces, as one token.
  bool echo = false;
  bool link_simulated = true;
  // Called with every event before it goes out; may change it. For texts that no model would make.
  std::function<void(runtime::GenerateEvent&)> edit_event;
  // Called with every state that is asked for; may change it.
  std::function<void(runtime::EngineState&)> edit_state;
};

// Thread-safe.
class FakeEngine final : public runtime::Engine {
 public:
  FakeEngine(const runtime::EngineOptions& options, FakeEngineOptions fake,
             runtime::EngineObserver* observer);
  ~FakeEngine() override;

  // What tests do to it.
  void Freeze(bool frozen) { frozen_.store(frozen); }  // No step is made, nor a heartbeat.
  void Fail(const absl::Status& health);
  // When Cancel was called for the request; infinite past if never.
  absl::Time cancel_time(std::string_view request_id) const;
  bool in_flight(std::string_view request_id) const;
  int slow_consumers() const { return slow_consumers_.load(); }
  std::optional<runtime::GenerateRequest> last_request() const;

  const runtime::MemoryPlan& plan() const override { return plan_; }
  const runtime::ModelInfo& model() const override { return model_; }
  absl::StatusOr<RequestId> Submit(runtime::GenerateRequest request,
                                   std::shared_ptr<runtime::GenerateSink> sink) override;
  void Cancel(RequestId id) override;
  bool Abort(std::string_view request_id) override;
  absl::StatusOr<std::vector<TokenId>> Tokenize(const std::vector<runtime::PromptSegment>& segments,
                                                std::optional<bool> add_bos) const override;
  std::string TokenBytes(TokenId id) const override;
  absl::StatusOr<std::string> Detokenize(const std::vector<TokenId>& ids,
                                         bool keep_special) const override;
  absl::StatusOr<runtime::ShareReply> SetCpuShare(const runtime::ShareUpdate& update) override;
  runtime::ShareState share() const override;
  roofline::MachineProfile machine_profile() const override;
  absl::Status SetLinkPace(double bytes_per_s) override;
  runtime::EngineState state() const override;
  void StartDrain() override { draining_.store(true); }
  bool AwaitIdle(absl::Duration timeout) override;
  void Stop() override;
  absl::Time last_heartbeat() const override;

 private:
  struct Running {
    RequestId id = 0;
    runtime::GenerateRequest request;
    std::shared_ptr<runtime::GenerateSink> sink;
    int64_t prompt_tokens = 0;
    int steps = 0;
    int64_t generated = 0;
    std::string echo;
    bool cancelled = false;
    bool aborted = false;
    absl::Time submitted;
  };

  absl::Status Check(const runtime::GenerateRequest& request, int64_t prompt_tokens) const;
  runtime::ShareState ShareLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Loop();
  void StepAll();
  void Step(Running& running);
  void Done(const Running& running, const absl::Status& status,
            std::optional<runtime::FinishReason> reason);
  bool Emit(const Running& running, runtime::GenerateEvent event);

  const FakeEngineOptions fake_;
  runtime::EngineObserver* const observer_;
  runtime::MemoryPlan plan_;
  runtime::ModelInfo model_;
  std::atomic<bool> frozen_{false};
  std::atomic<bool> draining_{false};
  std::atomic<bool> stopped_{false};
  std::atomic<int> slow_consumers_{0};
  std::atomic<int64_t> heartbeat_ns_;

  mutable std::mutex mutex_;
  std::condition_variable idle_;  // requests_ has become empty
  RequestId next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  std::vector<std::shared_ptr<Running>> requests_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, absl::Time, std::less<>> cancels_ ABSL_GUARDED_BY(mutex_);
  std::optional<runtime::GenerateRequest> last_request_ ABSL_GUARDED_BY(mutex_);
  runtime::EngineState state_ ABSL_GUARDED_BY(mutex_);
  runtime::ShareState share_ ABSL_GUARDED_BY(mutex_);
  absl::Time lease_end_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Time share_time_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::thread thread_;
};

}  // namespace writescope::testing_support
