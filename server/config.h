// The worker's configuration: one struct, checked once.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/base/log.h"
#include "engine/runtime/engine.h"

namespace writescope::server {

struct WorkerConfig {
  runtime::EngineOptions engine;
  std::string listen = "127.0.0.1:50051";
  std::string control_listen = "127.0.0.1:50052";
  std::string metrics_listen = "127.0.0.1:9464";
  bool vllm_metrics = false;  // vLLM's names too.
  std::string worker_id;      // Empty: host name and process id
  int64_t max_request_bytes = int64_t{64} << 20;
  // A client further behind than this loses its stream, and after the limit its connection.
  int64_t stream_buffer_bytes = kMiB;
  absl::Duration stream_stall_limit = absl::Seconds(10);
  absl::Duration drain_timeout = absl::Seconds(120);
  absl::Duration shutdown_grace = absl::Seconds(5);
  absl::Duration stall_limit = absl::Seconds(120);
  absl::Duration max_connection_age = absl::Minutes(30);
  absl::Duration max_connection_age_grace = absl::Hours(24);
  LogLevel log_level = LogLevel::kInfo;
  bool plan_only = false;
};

// Of the simulated link, where it has a pace: steps over a slower one would not end.
inline constexpr double kMinLinkBytesPerS = 1e6;

// Either a configuration, or a text to print and the code to exit with (--help, --version,
// --print-config, and errors).
struct ParsedConfig {
  std::optional<WorkerConfig> config;
  std::string message;
  int exit_code = 0;
};

// `arguments` without the program's name.
ParsedConfig ParseWorkerConfig(const std::vector<std::string>& arguments);

}  // namespace writescope::server
