// Every metric of the controller: name, unit, help. All series exist from the start, so that a
// dashboard is never empty. Updates are guarded: prometheus-cpp ignores a negative increment and
// lets one NaN spoil a series for ever, so such values are dropped and counted here.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <map>
#include <string>

#include "controller/control_loop.h"

namespace writescope::controller {

// Written by the loop's thread; the registry may be collected by any.
class Metrics final : public ControlObserver {
 public:
  Metrics(prometheus::Registry& registry, const std::string& version,
          const std::string& controller_id);

  void OnStep(const StepSample& sample, double predicted_seconds) override;
  void OnDecision(const DecisionRecord& record) override;
  void OnTick(const LoopStatus& status) override;

 private:
  prometheus::Gauge& AddGauge(const char* name, const char* help,
                              const prometheus::Labels& labels = {});
  prometheus::Counter& AddCounter(const char* name, const char* help,
                                  const prometheus::Labels& labels = {});
  void AddRates();
  void AddCounters();
  void Set(prometheus::Gauge& gauge, double value);
  // Counters follow totals that the loop keeps.
  void RaiseTo(prometheus::Counter& counter, uint64_t total);
  void Observe(prometheus::Histogram& histogram, double value);

  prometheus::Registry& registry_;
  prometheus::Counter& dropped_observations_;

  std::map<Role, prometheus::Gauge*> role_;
  prometheus::Gauge& connected_;
  prometheus::Gauge& generation_;
  prometheus::Gauge& own_generation_;
  prometheus::Gauge& pushed_share_;
  prometheus::Gauge& wanted_share_;
  prometheus::Gauge& observed_share_;
  prometheus::Gauge& spilled_bytes_;
  prometheus::Gauge& batch_size_;
  prometheus::Gauge& predicted_seconds_;
  prometheus::Gauge& predicted_lowest_seconds_;
  prometheus::Gauge& measured_seconds_;
  prometheus::Gauge& dense_seconds_;
  prometheus::Gauge* rate_cpu_alone_ = nullptr;
  prometheus::Gauge* rate_cpu_with_link_ = nullptr;
  prometheus::Gauge* rate_link_alone_ = nullptr;
  prometheus::Gauge* rate_link_with_cpu_ = nullptr;
  prometheus::Gauge* rate_device_ = nullptr;
  prometheus::Histogram& model_error_;
  prometheus::Histogram& step_seconds_;
  std::map<std::string, prometheus::Counter*> updates_;
  std::map<Action, prometheus::Counter*> decisions_;
  prometheus::Counter* steps_used_ = nullptr;
  prometheus::Counter* steps_ignored_ = nullptr;
  prometheus::Counter* steps_garbage_ = nullptr;
  prometheus::Counter* steps_dropped_ = nullptr;
  prometheus::Counter* cpu_changes_ = nullptr;
  prometheus::Counter* link_changes_ = nullptr;
  prometheus::Counter* connections_ = nullptr;
  prometheus::Counter* worker_restarts_ = nullptr;
  prometheus::Counter* log_errors_ = nullptr;
};

}  // namespace writescope::controller
