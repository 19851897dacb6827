#include "server/vllm_metrics.h"

#include <map>
#include <string>
#include <utility>

#include "prometheus/client_metric.h"

namespace writescope::server {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

struct Renamed {
  const char* ours;
  const char* theirs;
};

// Series that differ only in labels which vLLM does not have are added up.
constexpr Renamed kRenamed[] = {
    {"writescope_requests_running", "vllm:num_requests_running"},
    {"writescope_requests_waiting", "vllm:num_requests_waiting"},
    {"writescope_preemptions_total", "vllm:num_preemptions_total"},
    {"writescope_prompt_tokens_total", "vllm:prompt_tokens_total"},
    {"writescope_generation_tokens_total", "vllm:generation_tokens_total"},
    {"writescope_prefix_query_tokens_total", "vllm:prefix_cache_queries_total"},
    {"writescope_cached_prompt_tokens_total", "vllm:prefix_cache_hits_total"},
    {"writescope_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"},
    {"writescope_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"},
    {"writescope_request_latency_seconds", "vllm:e2e_request_latency_seconds"},
    {"writescope_queue_time_seconds", "vllm:request_queue_time_seconds"},
    {"writescope_prefill_time_seconds", "vllm:request_prefill_time_seconds"},
    {"writescope_decode_time_seconds", "vllm:request_decode_time_seconds"},
};

// vLLM has fewer reasons.
constexpr std::pair<const char*, const char*> kReasons[] = {
    {"eos_token", "stop"},    {"stop_token", "stop"}, {"stop_string", "stop"},
    {"max_tokens", "length"}, {"aborted", "abort"},   {"context_full", "length"},
    {"time_limit", "abort"},
};

std::string LabelOf(const ClientMetric& metric, const std::string& name) {
  for (const auto& label : metric.label) {
    if (label.name == name) return label.value;
  }
  return "";
}

double Value(const ClientMetric& metric, MetricType type) {
  return type == MetricType::Gauge ? metric.gauge.value : metric.counter.value;
}

ClientMetric Labelled(const std::string& model) {
  ClientMetric metric;
  metric.label = {{"model_name", model}, {"engine", "0"}};
  return metric;
}

MetricFamily Rename(const MetricFamily& family, const char* name) {
  MetricFamily renamed;
  renamed.name = name;
  renamed.help = family.help;
  renamed.type = family.type;
  if (family.metric.empty()) return renamed;
  ClientMetric sum = Labelled(LabelOf(family.metric[0], "model"));
  if (family.type == MetricType::Histogram) sum.histogram = family.metric[0].histogram;
  for (const ClientMetric& metric : family.metric) {
    sum.gauge.value += metric.gauge.value;
    sum.counter.value += metric.counter.value;
  }
  renamed.metric.push_back(std::move(sum));
  return renamed;
}

MetricFamily Successes(const MetricFamily& requests) {
  MetricFamily family;
  family.name = "vllm:request_success_total";
  family.help = "Finished requests, by vLLM's reasons.";
  family.type = MetricType::Counter;
  std::string model;
  std::map<std::string, double> sums = {{"stop", 0}, {"length", 0}, {"abort", 0}};
  for (const ClientMetric& metric : requests.metric) {
    model = LabelOf(metric, "model");
    const std::string reason = LabelOf(metric, "finish_reason");
    for (const auto& [ours, theirs] : kReasons) {
      if (reason == ours) sums[theirs] += metric.counter.value;
    }
  }
  for (const auto& [reason, sum] : sums) {
    ClientMetric metric = Labelled(model);
    metric.label.push_back({"finished_reason", reason});
    metric.counter.value = sum;
    family.metric.push_back(std::move(metric));
  }
  return family;
}

// The sum of a family's series whose label has this value; an empty name takes all.
double Sum(const MetricFamily& family, const std::string& label, const std::string& value) {
  double sum = 0;
  for (const ClientMetric& metric : family.metric) {
    if (label.empty() || LabelOf(metric, label) == value) sum += Value(metric, family.type);
  }
  return sum;
}

}  // namespace

std::vector<MetricFamily> VllmMetrics(const std::vector<MetricFamily>& families) {
  std::map<std::string, const MetricFamily*> known;
  for (const MetricFamily& family : families) known[family.name] = &family;
  std::vector<MetricFamily> result;
  for (const auto& [ours, theirs] : kRenamed) {
    const auto found = known.find(ours);
    if (found != known.end()) result.push_back(Rename(*found->second, theirs));
  }
  const auto requests = known.find("writescope_requests_total");
  if (requests != known.end()) result.push_back(Successes(*requests->second));
  const auto used = known.find("writescope_kv_used_bytes");
  const auto capacity = known.find("writescope_kv_capacity_bytes");
  if (used != known.end() && capacity != known.end() && !used->second->metric.empty()) {
    MetricFamily usage;
    usage.name = "vllm:kv_cache_usage_perc";
    usage.help = "Part of the KV memory, of device and host, that running requests hold; 1 is all.";
    usage.type = MetricType::Gauge;
    usage.metric.push_back(Labelled(LabelOf(used->second->metric[0], "model")));
    const double all = Sum(*capacity->second, "", "");
    const double active = Sum(*used->second, "state", "active");
    usage.metric[0].gauge.value = all > 0 ? active / all : 0;
    result.push_back(std::move(usage));
  }
  return result;
}

}  // namespace writescope::server
