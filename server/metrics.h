// Every metric of the worker. Names are stable; units are in them. All series exist, at zero, from
// the start. An update never fails a request: what cannot be counted is dropped and counted as
// dropped.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "engine/runtime/engine.h"
#include "prometheus/collectable.h"
#include "server/engine_slot.h"
#include "server/guarded_metrics.h"

namespace writescope::server {

struct MetricsInfo {
  std::string model;
  std::string device;
  std::string version;
  std::string kv_dtype;
  bool vllm_names = false;  // The common ones under vLLM's names too.
};

// Thread-safe. Collect() reads the engine's totals, so a scrape is as fresh as its moment.
class WorkerMetrics : public prometheus::Collectable {
 public:
  // `slot` outlives this.
  WorkerMetrics(const MetricsInfo& info, const EngineSlot* slot);

  std::vector<prometheus::MetricFamily> Collect() const override;

  // From the engine thread (runtime::EngineObserver).
  void CountStep(const runtime::StepStats& stats);
  void ObserveInterToken(double seconds) { inter_token_->Observe(seconds); }
  void CountRequestTimes(const runtime::RequestTimes& times);

  // From the services. `finish_reason` is "none" for a call that did not finish well.
  void CountCall(const std::string& method, const std::string& finish_reason,
                 const std::string& code);
  // `reason` is an ErrorInfo reason.
  void CountRejection(std::string_view reason);
  void CountPlacement(const runtime::PlacementReport& report);
  void CountShareUpdate(std::string_view result);
  void CountRepairedText() { repaired_text_->Add(); }
  void CountDroppedTelemetry(uint64_t messages);

  double dropped() const { return registry_.dropped(); }

 private:
  void MakeRequestMetrics();
  void MakeCacheMetrics();
  void MakeShareMetrics();
  void MakeProcessMetrics(const MetricsInfo& info);
  void Refresh(const runtime::Engine& engine) const;
  void RefreshCgroup() const;
  void RefreshCache(const runtime::EngineState& state) const;
  void RefreshShare(const runtime::EngineState& state, const runtime::ShareState& share) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(refresh_mutex_);

  const EngineSlot* const slot_;
  const bool vllm_names_;
  mutable GuardedRegistry registry_;

  // Requests.
  GuardedGauge* running_;
  GuardedGauge* waiting_;
  GuardedCounter* prompt_tokens_;
  GuardedCounter* generation_tokens_;
  GuardedCounter* prefix_query_tokens_;
  GuardedCounter* cached_gpu_tokens_;
  GuardedCounter* cached_host_tokens_;
  GuardedCounter* preemptions_pause_;
  GuardedCounter* preemptions_drop_;
  GuardedHistogram* first_token_;
  GuardedHistogram* inter_token_;
  GuardedHistogram* queue_time_;
  GuardedHistogram* prefill_time_;
  GuardedHistogram* decode_time_;
  GuardedHistogram* latency_;
  GuardedHistogram* cancel_latency_;
  // KV cache. Per region: device, stream, swing, host.
  struct RegionGauges {
    GuardedGauge* capacity;
    GuardedGauge* active;
    GuardedGauge* cached;
    GuardedGauge* retained;
    GuardedGauge* pinned;
    GuardedGauge* pageable;
  };
  std::array<RegionGauges, 4> regions_;
  GuardedCounter* moved_bytes_;
  GuardedCounter* upload_bytes_;
  GuardedCounter* download_bytes_;
  GuardedCounter* upload_seconds_;
  GuardedCounter* integrity_failures_;
  // Split.
  GuardedCounter* cpu_bytes_;
  GuardedCounter* gpu_bytes_;
  GuardedCounter* cpu_seconds_;
  GuardedCounter* gpu_seconds_;
  GuardedCounter* cpu_tokens_;
  GuardedCounter* gpu_tokens_;
  GuardedGauge* share_observed_;
  GuardedGauge* share_target_;
  GuardedGauge* share_min_;
  GuardedGauge* share_max_;
  GuardedGauge* share_generation_;
  GuardedGauge* lease_seconds_;
  GuardedGauge* controller_connected_;
  GuardedGauge* controller_age_;
  GuardedGauge* spilled_bytes_;
  GuardedGauge* predicted_step_;
  GuardedHistogram* model_error_;
  // Steps and process.
  GuardedHistogram* decode_step_;
  GuardedHistogram* prefill_step_;
  GuardedCounter* steps_;
  GuardedCounter* failed_steps_;
  GuardedCounter* ping_pong_steps_;
  GuardedCounter* replayed_steps_;
  GuardedCounter* step_graph_failures_;
  GuardedCounter* nan_logits_;
  GuardedCounter* repaired_text_;
  GuardedCounter* dropped_telemetry_;
  GuardedCounter* cpu_periods_;
  GuardedCounter* throttled_periods_;
  GuardedGauge* cpu_quota_;
  GuardedGauge* memory_used_;
  GuardedGauge* memory_limit_;
  GuardedGauge* cpu_workers_;
  GuardedGauge* link_pace_;
  GuardedGauge* link_simulated_;
  GuardedGauge* serving_;
  GuardedGauge* healthy_;

  mutable absl::Mutex refresh_mutex_;
  mutable bool had_lease_ ABSL_GUARDED_BY(refresh_mutex_) = false;
};

}  // namespace writescope::server
