// The worker's metrics under the names of vLLM, for autoscalers, gateways and dashboards that read
// those: --metrics-compat=vllm. The same numbers and buckets, with the labels model_name and
// engine.
#pragma once

#include <vector>

#include "prometheus/metric_family.h"

namespace writescope::server {

// `families` are the worker's own, of one scrape; the result holds only the vllm: ones, every
// series from the start.
std::vector<prometheus::MetricFamily> VllmMetrics(
    const std::vector<prometheus::MetricFamily>& families);

}  // namespace writescope::server
