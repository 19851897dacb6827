#include "server/guarded_metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "prometheus/text_serializer.h"

namespace writescope::server {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

std::string Text(const GuardedRegistry& registry) {
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, registry.Collect());
  return out.str();
}

TEST(GuardedMetrics, CounterDropsWhatWouldPoisonIt) {
  GuardedRegistry registry("ws", {});
  GuardedCounter& counter = registry.Counter("things_total", "Things.");
  counter.Add(2);
  counter.Add(kNan);
  counter.Add(-3);
  counter.Add(kInf);
  EXPECT_EQ(counter.value(), 2);
  EXPECT_EQ(registry.dropped(), 3);
}

TEST(GuardedMetrics, CounterFollowsATotal) {
  GuardedRegistry registry("ws", {});
  GuardedCounter& counter = registry.Counter("bytes_total", "Bytes.");
  counter.AdvanceTo(10);
  counter.AdvanceTo(25);
  counter.AdvanceTo(20);  // Fell back.
  counter.AdvanceTo(kNan);
  counter.AdvanceTo(26);
  EXPECT_EQ(counter.value(), 26);
  EXPECT_EQ(registry.dropped(), 2);
}

TEST(GuardedMetrics, HistogramAndGaugeDropNan) {
  GuardedRegistry registry("ws", {});
  GuardedGauge& gauge = registry.Gauge("level", "Level.");
  gauge.Set(-4);
  gauge.Set(kNan);
  EXPECT_EQ(gauge.value(), -4);
  GuardedHistogram& histogram = registry.Histogram("wait_seconds", "Wait.", {1, 10});
  histogram.Observe(kNan);
  histogram.Observe(-1);
  histogram.Observe(5);
  EXPECT_EQ(registry.dropped(), 3);
  const std::string text = Text(registry);
  EXPECT_NE(text.find("ws_wait_seconds_count 1"), std::string::npos) << text;
  EXPECT_NE(text.find("ws_wait_seconds_bucket{le=\"1\"} 0"), std::string::npos) << text;
  EXPECT_NE(text.find("ws_metrics_dropped_observations_total 3"), std::string::npos) << text;
}

TEST(GuardedMetrics, LabelsAreCleanAndTheSameLabelsGiveTheSameSeries) {
  GuardedRegistry registry("ws", {{"model", "a\xff"}});
  GuardedCounter& first = registry.Counter("calls_total", "Calls.", {{"code", "x\n\xe6\xad"}});
  GuardedCounter& second = registry.Counter("calls_total", "", {{"code", "x\n\xe6\xad"}});
  EXPECT_EQ(&first, &second);
  EXPECT_NE(&first, &registry.Counter("calls_total", "", {{"code", "y"}}));
  const std::string text = Text(registry);
  EXPECT_NE(text.find("model=\"a\xef\xbf\xbd\""), std::string::npos) << text;
  EXPECT_NE(text.find("code=\"x_\xef\xbf\xbd\""), std::string::npos) << text;
}

}  // namespace
}  // namespace writescope::server
