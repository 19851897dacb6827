#include "controller/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace writescope::controller {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class MetricsTest : public testing::Test {
 protected:
  MetricsTest() : metrics_(registry_, "1.2.3", "controller\n\"a\"") {}
  std::string Text() { return prometheus::TextSerializer().Serialize(registry_.Collect()); }

  prometheus::Registry registry_;
  Metrics metrics_;
};

TEST_F(MetricsTest, AllSeriesExistFromTheStart) {
  const std::string text = Text();
  for (const char* series :
       {"writescope_controller_connected 0",
        "writescope_controller_role{role=\"standby\"} 0",
        "writescope_controller_role{role=\"active\"} 0",
        "writescope_controller_generation 0",
        "writescope_controller_own_generation 0",
        "writescope_controller_cpu_share_ratio 0",
        "writescope_controller_wanted_cpu_share_ratio 0",
        "writescope_controller_observed_cpu_share_ratio 0",
        "writescope_controller_predicted_step_seconds 0",
        "writescope_controller_predicted_lowest_share_step_seconds 0",
        "writescope_controller_measured_step_seconds 0",
        "writescope_controller_dense_seconds 0",
        "writescope_controller_spilled_bytes 0",
        "writescope_controller_batch_size 0",
        "writescope_controller_rate_bytes_per_second{other=\"idle\",side=\"cpu\"} 0",
        "writescope_controller_rate_bytes_per_second{other=\"busy\",side=\"link\"} 0",
        "writescope_controller_rate_bytes_per_second{other=\"any\",side=\"device\"} 0",
        "writescope_controller_updates_total{outcome=\"applied\"} 0",
        "writescope_controller_updates_total{outcome=\"clamped\"} 0",
        "writescope_controller_updates_total{outcome=\"stale\"} 0",
        "writescope_controller_updates_total{outcome=\"error\"} 0",
        "writescope_controller_decisions_total{action=\"hold\"} 0",
        "writescope_controller_steps_total{result=\"garbage\"} 0",
        "writescope_controller_rate_changes_total{side=\"cpu\"} 0",
        "writescope_controller_connections_total 0",
        "writescope_controller_worker_restarts_total 0",
        "writescope_controller_decision_log_errors_total 0",
        "writescope_controller_model_error_ratio_count 0",
        "writescope_controller_step_seconds_count 0",
        "writescope_controller_metrics_dropped_observations_total 0"}) {
    EXPECT_THAT(text, HasSubstr(series));
  }
  // A label from outside cannot break the format.
  EXPECT_THAT(text, HasSubstr("controller_id=\"controller_\\\"a\\\"\""));
}

TEST_F(MetricsTest, GarbageIsDroppedAndCounted) {
  StepSample sample;
  sample.step_seconds = kNan;
  sample.observed_cpu_share = -1;
  metrics_.OnStep(sample, kNan);
  LoopStatus status;
  status.rates.cpu_alone = std::numeric_limits<double>::infinity();
  metrics_.OnTick(status);
  const std::string text = Text();
  EXPECT_THAT(text, Not(HasSubstr("Nan")));
  EXPECT_THAT(text, Not(HasSubstr("nan")));
  EXPECT_THAT(text, Not(HasSubstr(" +Inf\n")));
  EXPECT_THAT(text, HasSubstr("writescope_controller_metrics_dropped_observations_total 6"));
  EXPECT_THAT(text, HasSubstr("writescope_controller_step_seconds_count 0"));
}

TEST_F(MetricsTest, FollowsTheLoop) {
  DecisionRecord record;
  record.decision.action = Action::kPush;
  record.outcome = "clamped";
  metrics_.OnDecision(record);
  LoopStatus status;
  for (const auto& [role, steps_used] : {std::pair{Role::kNoWorker, 5u}, {Role::kStandby, 7u}}) {
    status.role = role;
    status.steps_used = steps_used;
    metrics_.OnTick(status);
  }
  const std::string text = Text();
  for (const char* line :
       {"updates_total{outcome=\"clamped\"} 1", "decisions_total{action=\"push\"} 1",
        "role{role=\"standby\"} 1", "role{role=\"no worker\"} 0", "connected 1",
        "steps_total{result=\"used\"} 7"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat("\nwritescope_controller_", line, "\n")));
  }
}

TEST_F(MetricsTest, EachSeriesShowsItsOwnField) {
  StepSample sample;
  sample.step_seconds = 0.5;
  sample.observed_cpu_share = 0.125;
  sample.spilled_bytes = 201;
  sample.batch_size = 7;
  metrics_.OnStep(sample, 0.75);
  DecisionRecord record;
  record.decision.action = Action::kRenew;
  record.decision.share = 0.25;
  record.decision.wanted_share = 0.375;
  record.decision.predicted_seconds = 0.625;
  record.decision.predicted_wanted_seconds = 0.6875;
  record.decision.predicted_lowest_seconds = 0.875;
  record.outcome = "stale";
  metrics_.OnDecision(record);
  LoopStatus status;
  status.role = Role::kActive;
  status.generation = 101;
  status.own_generation = 102;
  status.dense_seconds = 0.0625;
  status.rates = {103, 104, 105, 106, 107};
  status.steps_used = 108;
  status.steps_ignored = 109;
  status.steps_garbage = 110;
  status.steps_dropped = 111;
  status.cpu_changes = 112;
  status.link_changes = 113;
  status.connections = 114;
  status.worker_restarts = 115;
  status.log_errors = 116;
  metrics_.OnTick(status);
  metrics_.OnTick(status);  // Totals: the same again adds nothing.
  const std::string text = Text();
  for (const char* line : {
           "measured_step_seconds 0.5",
           "observed_cpu_share_ratio 0.125",
           "spilled_bytes 201",
           "batch_size 7",
           "predicted_step_seconds 0.75",
           "step_seconds_sum 0.5",
           "model_error_ratio_sum 0.5",
           "cpu_share_ratio 0.25",
           "wanted_cpu_share_ratio 0.375",
           "predicted_lowest_share_step_seconds 0.875",
           "decisions_total{action=\"hold\"} 0",
           "decisions_total{action=\"push\"} 0",
           "decisions_total{action=\"renew\"} 1",
           "updates_total{outcome=\"applied\"} 0",
           "updates_total{outcome=\"clamped\"} 0",
           "updates_total{outcome=\"stale\"} 1",
           "updates_total{outcome=\"error\"} 0",
           "role{role=\"active\"} 1",
           "role{role=\"standby\"} 0",
           "role{role=\"shadow\"} 0",
           "role{role=\"no worker\"} 0",
           "connected 1",
           "generation 101",
           "own_generation 102",
           "dense_seconds 0.0625",
           "rate_bytes_per_second{other=\"idle\",side=\"cpu\"} 103",
           "rate_bytes_per_second{other=\"busy\",side=\"cpu\"} 104",
           "rate_bytes_per_second{other=\"idle\",side=\"link\"} 105",
           "rate_bytes_per_second{other=\"busy\",side=\"link\"} 106",
           "rate_bytes_per_second{other=\"any\",side=\"device\"} 107",
           "steps_total{result=\"used\"} 108",
           "steps_total{result=\"ignored\"} 109",
           "steps_total{result=\"garbage\"} 110",
           "steps_total{result=\"dropped\"} 111",
           "rate_changes_total{side=\"cpu\"} 112",
           "rate_changes_total{side=\"link\"} 113",
           "connections_total 114",
           "worker_restarts_total 115",
           "decision_log_errors_total 116",
           "metrics_dropped_observations_total 0",
       }) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat("\nwritescope_controller_", line, "\n")));
  }
}

TEST_F(MetricsTest, AStepWithoutAPredictionHasNoError) {
  StepSample sample;
  sample.step_seconds = 0.5;
  metrics_.OnStep(sample, 0.25);
  metrics_.OnStep(sample, 0);
  const std::string text = Text();
  EXPECT_THAT(text, HasSubstr("writescope_controller_step_seconds_count 2"));
  EXPECT_THAT(text, HasSubstr("writescope_controller_model_error_ratio_count 1"));
  EXPECT_THAT(text, HasSubstr("writescope_controller_predicted_step_seconds 0.25"));
}

}  // namespace
}  // namespace writescope::controller
