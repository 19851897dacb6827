#include "server/metrics.h"

#include <limits>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"
#include "server/metrics_server.h"
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

// A field of the state under the wrong name would still be a number.
TEST_F(MetricsTest, EachSeriesShowsItsOwnFieldOfTheState) {
  testing_support::FakeEngineOptions fake;
  fake.edit_state = [](runtime::EngineState& state) {
    state.running_requests = 1;
    state.waiting_requests = 2;
    state.regions = {{.region = runtime::RegionName::kSwing,
                      .capacity_bytes = 3,
                      .used_bytes = 4,
                      .cached_bytes = 5,
                      .retained_bytes = 6,
                      .page_locked = true}};
    state.moved_bytes_total = 7;
    state.steps_total = 8;
    state.prefix_query_tokens_total = 9;
    state.prefix_hit_tokens_device_total = 10;
    state.prefix_hit_tokens_host_total = 11;
    state.preemptions_pause_total = 12;
    state.preemptions_drop_total = 13;
    state.failed_steps_total = 14;
    state.replayed_steps_total = 15;
    state.step_graph_failures_total = 16;
    state.nan_logits_total = 17;
    state.upload_bytes_total = 18;
    state.download_bytes_total = 19;
    state.cpu_attended_bytes_total = 20;
    state.device_attended_bytes_total = 21;
    state.cpu_busy_seconds_total = 22;
    state.device_attention_seconds_total = 23;
    state.link_busy_seconds_total = 24;
    state.cpu_workers = 25;
    state.link_pace_bytes_per_s = 26;
    runtime::StepStats& step = state.last_decode_step.emplace();
    step.observed_cpu_share = 0.27;
    step.planned_cpu_share = 0.28;
    step.spilled_bytes = 29;
    step.predicted_step_seconds = 30;
  };
  Start(fake);
  std::string text = MetricsText();
  absl::StrReplaceAll({{"model=\"fake\",", ""}, {"{model=\"fake\"}", ""}}, &text);
  for (const char* series : {
           "requests_running 1",
           "requests_waiting 2",
           R"(kv_capacity_bytes{region="swing"} 3)",
           R"(pinned_bytes{pinned="true",region="swing"} 3)",
           R"(kv_used_bytes{region="swing",state="active"} 4)",
           R"(kv_used_bytes{region="swing",state="cached"} 5)",
           R"(kv_used_bytes{region="swing",state="retained"} 6)",
           "kv_moved_bytes_total 7",
           "steps_total 8",
           "prefix_query_tokens_total 9",
           R"(cached_prompt_tokens_total{tier="gpu"} 10)",
           R"(cached_prompt_tokens_total{tier="host"} 11)",
           R"(preemptions_total{kind="pause"} 12)",
           R"(preemptions_total{kind="drop"} 13)",
           "failed_steps_total 14",
           "replayed_steps_total 15",
           "step_graph_failures_total 16",
           R"(numeric_anomalies_total{kind="nan_logits"} 17)",
           R"(kv_transfer_bytes_total{direction="h2d"} 18)",
           R"(kv_transfer_bytes_total{direction="d2h"} 19)",
           R"(attention_bytes_total{device="cpu"} 20)",
           R"(attention_bytes_total{device="gpu"} 21)",
           R"(attention_seconds_total{device="cpu"} 22)",
           R"(attention_seconds_total{device="gpu"} 23)",
           R"(kv_transfer_seconds_total{direction="h2d"} 24)",
           "worker_threads 25",
           "link_pace_bytes_per_second 26",
           "cpu_share_ratio 0.27",
           "cpu_share_target_ratio 0.28",
           "step_spilled_bytes 29",
           "model_predicted_step_seconds 30",
       }) {
    ExpectLine(text, absl::StrCat("writescope_", series));
  }
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

TEST(WorkerMetricsTest, EachHistogramShowsItsOwnTime) {
  EngineSlot slot;
  WorkerMetrics metrics({.model = "m", .device = "cpu", .version = "0", .kv_dtype = "bf16"}, &slot);
  runtime::RequestTimes times;
  times.queue_seconds = 1;
  times.prefill_seconds = 2;
  times.first_token_seconds = 4;
  times.decode_seconds = 8;
  times.total_seconds = 16;
  times.cancel_seconds = 32;
  metrics.CountRequestTimes(times);
  runtime::StepStats step;
  step.kind = runtime::StepKind::kPrefill;
  step.step_seconds = 64;
  metrics.CountStep(step);
  step.kind = runtime::StepKind::kDecode;
  step.step_seconds = 128;
  step.predicted_step_seconds = 64;
  metrics.CountStep(step);
  for (const char* reason : {"KV_CAPACITY_EXCEEDED", "CONTEXT_LENGTH_EXCEEDED"}) {
    metrics.CountRejection(reason);
  }
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, metrics.Collect());
  for (const char* series :
       {"queue_time_seconds_sum{model=\"m\"} 1", "prefill_time_seconds_sum{model=\"m\"} 2",
        "time_to_first_token_seconds_sum{model=\"m\"} 4", "decode_time_seconds_sum{model=\"m\"} 8",
        "request_latency_seconds_sum{model=\"m\"} 16", "cancel_latency_seconds_sum{model=\"m\"} 32",
        "step_seconds_sum{model=\"m\",kind=\"prefill\"} 64",
        "step_seconds_sum{model=\"m\",kind=\"decode\"} 128", "model_error_ratio_sum{model=\"m\"} 1",
        "queue_rejections_total{model=\"m\",reason=\"kv_capacity\"} 1",
        "queue_rejections_total{model=\"m\",reason=\"context_length\"} 1"}) {
    ExpectLine(out.str(), absl::StrCat("writescope_", series));
  }
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
