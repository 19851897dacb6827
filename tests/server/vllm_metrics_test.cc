#include "server/vllm_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "prometheus/text_serializer.h"
#include "server/metrics.h"

namespace writescope::server {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string Text(const std::vector<prometheus::MetricFamily>& families) {
  return prometheus::TextSerializer().Serialize(families);
}

// Names that autoscalers, the Gateway API's picker and public dashboards read.
TEST(VllmMetrics, EverySeriesIsThereFromTheStart) {
  EngineSlot slot;
  const WorkerMetrics metrics(
      {.model = "m", .device = "cpu", .version = "0", .kv_dtype = "bf16", .vllm_names = true},
      &slot);
  const std::string text = Text(metrics.Collect());
  for (const char* series : {
           "vllm:num_requests_running{model_name=\"m\",engine=\"0\"} 0\n",
           "vllm:num_requests_waiting{model_name=\"m\",engine=\"0\"} 0\n",
           "vllm:kv_cache_usage_perc{model_name=\"m\",engine=\"0\"} 0\n",
           "vllm:num_preemptions_total{model_name=\"m\",engine=\"0\"} 0\n",
           "vllm:prompt_tokens_total{model_name=\"m\",engine=\"0\"} 0\n",
           "vllm:generation_tokens_total{model_name=\"m\",engine=\"0\"} 0\n",
           "vllm:prefix_cache_queries_total{model_name=\"m\",engine=\"0\"} 0\n",
           "vllm:prefix_cache_hits_total{model_name=\"m\",engine=\"0\"} 0\n",
           "vllm:request_success_total{model_name=\"m\",engine=\"0\",finished_reason=\"stop\"} 0\n",
           "vllm:time_to_first_token_seconds_bucket{model_name=\"m\",engine=\"0\",le=\"2560\"} 0\n",
           "vllm:inter_token_latency_seconds_count{model_name=\"m\",engine=\"0\"} 0\n",
           "vllm:e2e_request_latency_seconds_sum{model_name=\"m\",engine=\"0\"} 0\n",
           "vllm:request_queue_time_seconds_count{model_name=\"m\",engine=\"0\"} 0\n",
           "vllm:request_prefill_time_seconds_count{model_name=\"m\",engine=\"0\"} 0\n",
           "vllm:request_decode_time_seconds_count{model_name=\"m\",engine=\"0\"} 0\n",
       }) {
    EXPECT_THAT(text, HasSubstr(series));
  }
  const WorkerMetrics without({.model = "m", .device = "cpu", .version = "0", .kv_dtype = "bf16"},
                              &slot);
  EXPECT_THAT(Text(without.Collect()), Not(HasSubstr("vllm:")));
}

TEST(VllmMetrics, SeriesThatVllmDoesNotTellApartAreAddedUp) {
  GuardedRegistry registry("writescope", {{"model", "m"}});
  const auto finished = [&](const char* reason) -> GuardedCounter& {
    return registry.Counter("requests_total", "Calls.", {{"finish_reason", reason}});
  };
  finished("eos_token").Add(1);
  finished("stop_string").Add(2);
  finished("max_tokens").Add(4);
  finished("aborted").Add(8);
  finished("none").Add(16);  // It failed: no success.
  registry.Counter("cached_prompt_tokens_total", "Hits.", {{"tier", "gpu"}}).Add(30);
  registry.Counter("cached_prompt_tokens_total", "Hits.", {{"tier", "host"}}).Add(12);
  registry.Gauge("kv_capacity_bytes", "Room.", {{"region", "device"}}).Set(100);
  registry.Gauge("kv_capacity_bytes", "Room.", {{"region", "swing"}}).Set(300);
  registry.Gauge("kv_used_bytes", "Used.", {{"region", "device"}, {"state", "active"}}).Set(60);
  registry.Gauge("kv_used_bytes", "Used.", {{"region", "swing"}, {"state", "active"}}).Set(40);
  registry.Gauge("kv_used_bytes", "Used.", {{"region", "swing"}, {"state", "cached"}}).Set(200);
  registry.Histogram("time_to_first_token_seconds", "Wait.", {1, 2}).Observe(1.5);
  const std::string text = Text(VllmMetrics(registry.Collect()));
  for (const char* line :
       {"finished_reason=\"stop\"} 3\n", "finished_reason=\"length\"} 4\n",
        "finished_reason=\"abort\"} 8\n",
        "vllm:prefix_cache_hits_total{model_name=\"m\",engine=\"0\"} 42\n",
        "vllm:kv_cache_usage_perc{model_name=\"m\",engine=\"0\"} 0.25\n",
        "vllm:time_to_first_token_seconds_bucket{model_name=\"m\",engine=\"0\",le=\"1\"} 0\n",
        "vllm:time_to_first_token_seconds_bucket{model_name=\"m\",engine=\"0\",le=\"2\"} 1\n",
        "vllm:time_to_first_token_seconds_sum{model_name=\"m\",engine=\"0\"} 1.5\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

}  // namespace
}  // namespace writescope::server
