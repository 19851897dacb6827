// The controller's configuration: one struct, checked once.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "controller/control_loop.h"
#include "controller/policy.h"
#include "engine/base/log.h"

namespace writescope::controller {

struct Config {
  std::string worker_address;
  std::string metrics_listen;
  std::string decision_log;  // Empty: none.
  int64_t decision_log_bytes = 0;
  LogLevel log_level = LogLevel::kInfo;
  ControlOptions control;
};

// Either a configuration, or a message to print before leaving with the exit code (0 for --help,
// --version and --print-config).
struct ParsedConfig {
  std::optional<Config> config;
  std::string message;
  int exit_code = 0;
};

// `args` without the program's name.
ParsedConfig ParseConfig(const std::vector<std::string>& args);

// Likewise for writescope-replay.
struct ReplayConfig {
  std::string path;
  PolicyOptions policy;
  int rows = 0;
};
struct ParsedReplayConfig {
  std::optional<ReplayConfig> config;
  std::string message;
  int exit_code = 0;
};
ParsedReplayConfig ParseReplayConfig(const std::vector<std::string>& args);

}  // namespace writescope::controller
