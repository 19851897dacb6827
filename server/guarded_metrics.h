// prometheus-cpp behind a guard. It lets a NaN poison a counter for ever, counts a NaN observation
// in the smallest bucket and passes broken label bytes on; here such values are dropped and
// counted.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"

namespace writescope::server {

using MetricLabels = std::map<std::string, std::string>;

// Thread-safe; owned by the GuardedRegistry that made it.
class GuardedCounter {
 public:
  GuardedCounter(prometheus::Counter* counter, prometheus::Counter* dropped)
      : counter_(counter), dropped_(dropped) {}
  // NaN, infinite and negative amounts are dropped.
  void Add(double amount = 1);
  // For totals kept elsewhere: adds what is new since the last call. A total that fell is dropped.
  void AdvanceTo(double total);
  double value() const { return counter_->Value(); }

 private:
  prometheus::Counter* const counter_;
  prometheus::Counter* const dropped_;
  std::mutex mutex_;
  double last_total_ = 0;
};

// Thread-safe.
class GuardedGauge {
 public:
  GuardedGauge(prometheus::Gauge* gauge, prometheus::Counter* dropped)
      : gauge_(gauge), dropped_(dropped) {}
  // NaN and infinite values are dropped; the old one stays.
  void Set(double value);
  double value() const { return gauge_->Value(); }

 private:
  prometheus::Gauge* const gauge_;
  prometheus::Counter* const dropped_;
};

// Thread-safe.
class GuardedHistogram {
 public:
  GuardedHistogram(prometheus::Histogram* histogram, prometheus::Counter* dropped)
      : histogram_(histogram), dropped_(dropped) {}
  // NaN, infinite and negative values are dropped.
  void Observe(double value);

 private:
  prometheus::Histogram* const histogram_;
  prometheus::Counter* const dropped_;
};

// Makes metrics, each at zero from the start. Thread-safe.
class GuardedRegistry {
 public:
  // `prefix` and '_' go in front of every name; `constant` labels are on every series.
  GuardedRegistry(std::string prefix, MetricLabels constant);

  GuardedCounter& Counter(const std::string& name, const std::string& help,
                          const MetricLabels& labels = {});
  GuardedGauge& Gauge(const std::string& name, const std::string& help,
                      const MetricLabels& labels = {});
  GuardedHistogram& Histogram(const std::string& name, const std::string& help,
                              const std::vector<double>& buckets, const MetricLabels& labels = {});

  std::vector<prometheus::MetricFamily> Collect() const { return registry_.Collect(); }
  double dropped() const { return dropped_->Value(); }

 private:
  template <typename Metric, typename Builder>
  prometheus::Family<Metric>& FamilyOf(std::map<std::string, prometheus::Family<Metric>*>& known,
                                       Builder builder, const std::string& name,
                                       const std::string& help);

  const std::string prefix_;
  const MetricLabels constant_;
  prometheus::Registry registry_;
  prometheus::Counter* dropped_ = nullptr;
  std::mutex mutex_;
  std::map<std::string, prometheus::Family<prometheus::Counter>*> counter_families_;
  std::map<std::string, prometheus::Family<prometheus::Gauge>*> gauge_families_;
  std::map<std::string, prometheus::Family<prometheus::Histogram>*> histogram_families_;
  // By name and labels: asking twice gives the same one.
  std::map<std::string, std::unique_ptr<GuardedCounter>> counters_;
  std::map<std::string, std::unique_ptr<GuardedGauge>> gauges_;
  std::map<std::string, std::unique_ptr<GuardedHistogram>> histograms_;
};

}  // namespace writescope::server
