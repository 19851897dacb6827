#include "server/metrics.h"

#include <limits>
#include <set>
#include <sstream>

#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"
#include "tests/controller/http_get.h"
#include "tests/server/worker_fixture.h"

namespace writescope::server {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// What dashboards and alerts refer to. A name may be added, never changed.
const char* const kNames[] = {
    "writescope_attention_bytes_total",
    "writescope_attention_seconds_total",
    "writescope_attention_tokens_total",
    "writescope_build_info",
    "writescope_cached_prompt_tokens_total",
    "writescope_cancel_latency_seconds",
    "writescope_cgroup_memory_limit_bytes",
    "writescope_cgroup_memory_used_bytes",
    "writescope_config_info",
    "writescope_controller_last_update_age_seconds",
    "writescope_controller_lease_active",
    "writescope_controller_lease_seconds",
    "writescope_cpu_periods_total",
    "writescope_cpu_quota_cores",
    "writescope_cpu_share_generation",
    "writescope_cpu_share_max_ratio",
    "writescope_cpu_share_min_ratio",
    "writescope_cpu_share_ratio",
    "writescope_cpu_share_target_ratio",
    "writescope_cpu_throttled_periods_total",
    "writescope_decode_time_seconds",
    "writescope_engine_healthy",
    "writescope_failed_steps_total",
    "writescope_generation_tokens_total",
    "writescope_inter_token_latency_seconds",
    "writescope_kv_capacity_bytes",
    "writescope_kv_integrity_failures_total",
    "writescope_kv_moved_bytes_total",
    "writescope_kv_transfer_bytes_total",
    "writescope_kv_transfer_seconds_total",
    "writescope_kv_used_bytes",
    "writescope_link_pace_bytes_per_second",
    "writescope_link_simulated",
    "writescope_metrics_dropped_observations_total",
    "writescope_model_error_ratio",
    "writescope_model_predicted_step_seconds",
    "writescope_numeric_anomalies_total",
    "writescope_ping_pong_steps_total",
    "writescope_pinned_bytes",
    "writescope_preemptions_total",
    "writescope_prefill_time_seconds",
    "writescope_prefix_query_tokens_total",
    "writescope_prompt_tokens_total",
    "writescope_queue_rejections_total",
    "writescope_queue_time_seconds",
    "writescope_repaired_text_total",
    "writescope_replayed_steps_total",
    "writescope_request_latency_seconds",
    "writescope_requests_running",
    "writescope_requests_total",
    "writescope_requests_waiting",
    "writescope_serving",
    "writescope_share_updates_total",
    "writescope_step_graph_failures_total",
    "writescope_step_seconds",
    "writescope_step_spilled_bytes",
    "writescope_steps_total",
    "writescope_telemetry_dropped_total",
    "writescope_time_to_first_token_seconds",
    "writescope_worker_threads",
};

std::set<std::string> NamesIn(const std::string& text) {
  std::set<std::string> names;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("# TYPE writescope_", 0) == 0)
      names.insert(line.substr(7, line.find(' ', 7) - 7));
  }
  return names;
}

// A short message instead of the whole page.
void ExpectLine(const std::string& text, const std::string& line) {
  EXPECT_NE(("\n" + text).find("\n" + line + "\n"), std::string::npos) << "missing: " << line;
}

class MetricsTest : public WorkerFixture {};

TEST_F(MetricsTest, EveryFamilyIsThereAtZeroFromTheStart) {
  // Not even loaded; as Prometheus gets it.
  ListenOnly([](WorkerConfig& config) { config.metrics_listen = "127.0.0.1:0"; });
  const std::string text = Scrape(worker_->metrics_address());
  EXPECT_EQ(NamesIn(text), std::set<std::string>(std::begin(kNames), std::end(kNames)));
  for (const char* series :
       {"writescope_kv_moved_bytes_total{model=\"fake\"} 0",
        "writescope_attention_bytes_total{model=\"fake\",device=\"cpu\"} 0",
        "writescope_attention_bytes_total{model=\"fake\",device=\"gpu\"} 0",
        "writescope_kv_used_bytes{model=\"fake\",region=\"swing\",state=\"active\"} 0",
        "writescope_share_updates_total{model=\"fake\",result=\"stale\"} 0",
        "writescope_requests_total{model=\"fake\",code=\"OK\",finish_reason=\"eos_token\",method="
        "\"Generate\"} 0",
        "writescope_serving{model=\"fake\"} 0"}) {
    ExpectLine(text, series);
  }
  // Each family has a help text.
  EXPECT_THAT(text, Not(::testing::ContainsRegex("# HELP [a-z_]+ *\n")));
}

TEST_F(MetricsTest, FollowTheEngine) {
  Start();
  v1::GenerateRequest request = TextRequest("12345");
  request.mutable_stopping()->set_max_tokens(7);
  ASSERT_TRUE(Generate(request).status.ok());
  const std::string text = MetricsText();
  for (const char* series :
       {"writescope_prompt_tokens_total{model=\"fake\"} 5",
        "writescope_generation_tokens_total{model=\"fake\"} 7",
        "writescope_attention_tokens_total{model=\"fake\",device=\"cpu\"} 30",
        "writescope_attention_tokens_total{model=\"fake\",device=\"gpu\"} 30",
        "writescope_cpu_share_ratio{model=\"fake\"} 0.5",
        "writescope_kv_capacity_bytes{model=\"fake\",region=\"swing\"} 67108864",
        "writescope_time_to_first_token_seconds_count{model=\"fake\"} 1",
        "writescope_requests_total{model=\"fake\",code=\"OK\",finish_reason=\"max_tokens\",method="
        "\"Generate\"} 1",
        "writescope_serving{model=\"fake\"} 1"}) {
    ExpectLine(text, series);
  }
  // Totals are added once, however often they are scraped.
  ExpectLine(MetricsText(), ("writescope_generation_tokens_total{model=\"fake\"} 7"));
}

TEST_F(MetricsTest, VllmNamesComeOnRequest) {
  Start({}, [](WorkerConfig& config) {
    config.metrics_listen = "127.0.0.1:0";
    config.vllm_metrics = true;
  });
  v1::GenerateRequest request = TextRequest("12345");
  request.mutable_stopping()->set_max_tokens(3);
  ASSERT_TRUE(Generate(request).status.ok());
  const std::string text = Scrape(worker_->metrics_address());
  ExpectLine(text, "vllm:prompt_tokens_total{model_name=\"fake\",engine=\"0\"} 5");
  ExpectLine(text, "writescope_prompt_tokens_total{model=\"fake\"} 5");
}

TEST_F(MetricsTest, NothingFromTheEnginePoisonsThem) {
  EngineSlot slot;
  WorkerMetrics metrics({.model = "m", .device = "cpu", .version = "0", .kv_dtype = "bf16"}, &slot);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  runtime::StepStats stats;
  stats.step_seconds = nan;
  stats.predicted_step_seconds = 1;
  metrics.CountStep(stats);
  metrics.ObserveInterToken(-1);
  runtime::RequestTimes times;
  times.total_seconds = std::numeric_limits<double>::infinity();
  metrics.CountRequestTimes(times);
  metrics.CountPlacement({.cpu_tokens = -5});
  EXPECT_EQ(metrics.dropped(), 5);
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, metrics.Collect());
  EXPECT_THAT(out.str(), Not(HasSubstr("Nan")));
  ExpectLine(out.str(), ("writescope_metrics_dropped_observations_total{model=\"m\"} 5"));
}

TEST(WorkerMetricsTest, ARequestThatEndedInTheQueueWasNotRead) {
  EngineSlot slot;
  WorkerMetrics metrics({.model = "m", .device = "cpu", .version = "0", .kv_dtype = "bf16"}, &slot);
  runtime::RequestTimes times;
  times.usage.prompt_tokens = 9;
  times.total_seconds = times.queue_seconds = 3;
  metrics.CountRequestTimes(times);
  times.prefill_seconds = 1;
  metrics.CountRequestTimes(times);
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, metrics.Collect());
  ExpectLine(out.str(), "writescope_queue_time_seconds_count{model=\"m\"} 2");
  ExpectLine(out.str(), "writescope_prefill_time_seconds_count{model=\"m\"} 1");
}

TEST(MetricsServerTest, SilentConnectionsDoNotStopScrapes) {
  const auto server =
      MetricsServer::Create("127.0.0.1:0", std::make_shared<prometheus::Registry>());
  ASSERT_TRUE(server.ok()) << server.status();
  const std::vector<int> silent = controller::ConnectSilently((*server)->address(), 12);
  const absl::Time start = absl::Now();
  EXPECT_THAT(controller::HttpGet((*server)->address(), "/metrics"), HasSubstr("200 OK"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  for (const int fd : silent) close(fd);
}

TEST_F(MetricsTest, ExpiredLeaseIsCounted) {
  Start();
  v1::SetCpuShareRequest request;
  request.set_controller_id("c");
  request.set_generation(1);
  request.mutable_valid_for()->set_nanos(300'000'000);
  v1::ShareBucket* bucket = request.add_buckets();
  bucket->set_max_batch(1);
  v1::SharePoint* point = bucket->add_points();
  point->set_spilled_bytes(1);
  point->set_cpu_share(0.2);
  grpc::ClientContext context;
  SetDeadline(context);
  v1::SetCpuShareResponse response;
  ASSERT_TRUE(control_->SetCpuShare(&context, request, &response).ok());
  ExpectLine(MetricsText(), ("writescope_controller_lease_active{model=\"fake\"} 1"));
  absl::SleepFor(absl::Milliseconds(400));
  const std::string text = MetricsText();
  ExpectLine(text, ("writescope_controller_lease_active{model=\"fake\"} 0"));
  ExpectLine(text, ("writescope_share_updates_total{model=\"fake\",result=\"expired\"} 1"));
  ExpectLine(text, ("writescope_share_updates_total{model=\"fake\",result=\"applied\"} 1"));
}

}  // namespace
}  // namespace writescope::server
