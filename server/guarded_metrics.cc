#include "server/guarded_metrics.h"

#include <cmath>
#include <utility>

#include "engine/base/utf8.h"

namespace writescope::server {
namespace {

MetricLabels Sanitised(const MetricLabels& labels) {
  MetricLabels clean;
  for (const auto& [name, value] : labels) {
    std::string text = RepairUtf8(value);
    for (char& c : text) {
      if (static_cast<unsigned char>(c) < ' ' || c == 0x7f) c = '_';
    }
    clean[name] = std::move(text);
  }
  return clean;
}

std::string Key(const std::string& name, const MetricLabels& labels) {
  std::string key = name;
  for (const auto& [label, value] : labels) {
    key.append(1, '\0').append(label).append(1, '\0').append(value);
  }
  return key;
}

}  // namespace

void GuardedCounter::Add(double amount) {
  if (!std::isfinite(amount) || amount < 0) {
    dropped_->Increment();
  } else if (amount > 0) {
    counter_->Increment(amount);
  }
}

void GuardedCounter::AdvanceTo(double total) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!std::isfinite(total) || total < last_total_) {
    dropped_->Increment();
    return;
  }
  counter_->Increment(total - last_total_);
  last_total_ = total;
}

void GuardedGauge::Set(double value) {
  if (std::isfinite(value)) {
    gauge_->Set(value);
  } else {
    dropped_->Increment();
  }
}

void GuardedHistogram::Observe(double value) {
  if (std::isfinite(value) && value >= 0) {
    histogram_->Observe(value);
  } else {
    dropped_->Increment();
  }
}

GuardedRegistry::GuardedRegistry(std::string prefix, MetricLabels constant)
    : prefix_(std::move(prefix) + "_"), constant_(Sanitised(constant)) {
  dropped_ =
      &FamilyOf<prometheus::Counter>(
           counter_families_, prometheus::BuildCounter(), "metrics_dropped_observations_total",
           "Metric updates that were NaN, infinite or negative, and left out.")
           .Add({});
}

template <typename Metric, typename Builder>
prometheus::Family<Metric>& GuardedRegistry::FamilyOf(
    std::map<std::string, prometheus::Family<Metric>*>& known, Builder builder,
    const std::string& name, const std::string& help) {
  prometheus::Family<Metric>*& family = known[name];
  if (family == nullptr) {
    family = &builder.Name(prefix_ + name).Help(help).Labels(constant_).Register(registry_);
  }
  return *family;
}

GuardedCounter& GuardedRegistry::Counter(const std::string& name, const std::string& help,
                                         const MetricLabels& labels) {
  const MetricLabels clean = Sanitised(labels);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<GuardedCounter>& counter = counters_[Key(name, clean)];
  if (counter == nullptr) {
    auto& family =
        FamilyOf<prometheus::Counter>(counter_families_, prometheus::BuildCounter(), name, help);
    counter = std::make_unique<GuardedCounter>(&family.Add(clean), dropped_);
  }
  return *counter;
}

GuardedGauge& GuardedRegistry::Gauge(const std::string& name, const std::string& help,
                                     const MetricLabels& labels) {
  const MetricLabels clean = Sanitised(labels);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<GuardedGauge>& gauge = gauges_[Key(name, clean)];
  if (gauge == nullptr) {
    auto& family =
        FamilyOf<prometheus::Gauge>(gauge_families_, prometheus::BuildGauge(), name, help);
    gauge = std::make_unique<GuardedGauge>(&family.Add(clean), dropped_);
  }
  return *gauge;
}

GuardedHistogram& GuardedRegistry::Histogram(const std::string& name, const std::string& help,
                                             const std::vector<double>& buckets,
                                             const MetricLabels& labels) {
  const MetricLabels clean = Sanitised(labels);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<GuardedHistogram>& histogram = histograms_[Key(name, clean)];
  if (histogram == nullptr) {
    auto& family = FamilyOf<prometheus::Histogram>(histogram_families_,
                                                   prometheus::BuildHistogram(), name, help);
    histogram = std::make_unique<GuardedHistogram>(&family.Add(clean, buckets), dropped_);
  }
  return *histogram;
}

}  // namespace writescope::server
