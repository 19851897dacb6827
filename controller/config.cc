#include "controller/config.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "controller/version.h"
#include "engine/base/address.h"
#include "engine/base/command_line.h"
#include "engine/base/status_macros.h"
#include "engine/base/utf8.h"

namespace writescope::controller {
namespace {

constexpr int kUsageExit = 2;

// As typed.
struct Flags {
  std::string worker = "127.0.0.1:50052";
  std::string metrics_listen = "127.0.0.1:9465";
  std::string lease = "15s";
  std::string interval = "250ms";
  std::string controller_id;
  std::string decision_log;
  int64_t decision_log_mib = 256;
  std::string log_level = "info";
  bool shadow = false;
  bool print_config = false;
};

void AddPolicyFlags(CLI::App& app, PolicyOptions& policy, double& pin_share) {
  app.add_option("--hysteresis", policy.hysteresis, "Push when the share moves by more than this")
      ->capture_default_str();
  app.add_option("--max-loss", policy.max_loss,
                 "Or when the share in force makes a step slower than need be by this fraction")
      ->capture_default_str();
  app.add_option("--max-change", policy.max_change, "Most that a share moves in one push")
      ->capture_default_str();
  app.add_option("--guard", policy.guard,
                 "No share may be slower than the lowest one by more than this fraction")
      ->capture_default_str();
  app.add_option("--min-steps", policy.min_steps,
                 "Steps with spilled KV to see before the first push")
      ->capture_default_str();
  app.add_option("--pin-share", pin_share, "Push this share whatever is measured");
}

void AddFlags(CLI::App& app, Flags& flags) {
  app.add_option("--worker", flags.worker, "The worker's control port: host:port or unix:path")
      ->capture_default_str();
  app.add_option("--metrics-listen", flags.metrics_listen,
                 "host:port of /metrics and /healthz; port 0 takes a free one")
      ->capture_default_str();
  app.add_option("--lease", flags.lease,
                 "How long the worker keeps a share that is not renewed; renewed at a third")
      ->capture_default_str();
  app.add_option("--interval", flags.interval, "Between two looks at the worker")
      ->capture_default_str();
  app.add_flag("--shadow", flags.shadow, "Decide and log, never push");
  app.add_option(
      "--controller-id", flags.controller_id,
      "Name towards the worker; stable names let a restart go on at once. Default: host, "
      "process and a random number");
  app.add_option("--decision-log", flags.decision_log,
                 "File for every decision with its inputs, as JSON lines");
  app.add_option("--decision-log-mib", flags.decision_log_mib,
                 "The log starts anew at this size, keeping one predecessor")
      ->capture_default_str();
  app.add_option("--log-level", flags.log_level, "debug, info, warning or error")
      ->capture_default_str();
  app.add_flag("--print-config", flags.print_config, "Print the checked configuration and leave");
  app.set_version_flag("--version", std::string("writescope-controller ") + kVersion);
}

// Nothing when it went on; else what to leave with.
std::optional<std::pair<std::string, int>> Parse(CLI::App& app,
                                                 const std::vector<std::string>& args) {
  // The library's way to report --help as well as mistakes.
  try {
    ParseArguments(app, args);
  } catch (const CLI::CallForHelp&) {
    return std::make_pair(app.help(), 0);
  } catch (const CLI::CallForVersion&) {
    return std::make_pair(app.version() + "\n", 0);
  } catch (const CLI::ParseError& error) {
    return std::make_pair(absl::StrCat(ExplainMistake(app, error), "\nTry --help.\n"), kUsageExit);
  }
  return std::nullopt;
}

absl::Status ParseDuration(const char* name, const std::string& text, absl::Duration& out) {
  if (absl::ParseDuration(text, &out)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", name, " is \"", text, "\", not a time such as 250ms or 15s"));
}

std::string DefaultControllerId() {
  std::array<char, 256> host = {};
  if (gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  // Process ids repeat: in containers each controller may be process 1.
  return absl::StrFormat("%s-%d-%08x", std::string(host.data()).substr(0, 64), getpid(),
                         std::random_device()());
}

absl::Status Check(const Flags& flags, Config& config) {
  config.worker_address = flags.worker;
  config.metrics_listen = flags.metrics_listen;
  config.decision_log = flags.decision_log;
  if (const std::string wrong = CheckServerAddress(flags.worker); !wrong.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("--worker: ", wrong));
  }
  if (const std::string wrong = CheckListenAddress(flags.metrics_listen); !wrong.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("--metrics-listen: ", wrong));
  }
  if (!IsWholeUtf8(flags.controller_id)) {
    return absl::InvalidArgumentError(
        "--controller-id: not valid UTF-8, which the worker takes names in");
  }
  if (flags.decision_log_mib < 1 || flags.decision_log_mib > 1 << 20) {
    return absl::InvalidArgumentError(absl::StrCat("--decision-log-mib is ", flags.decision_log_mib,
                                                   ", it has to be from 1 to 1048576"));
  }
  config.decision_log_bytes = flags.decision_log_mib << 20;
  RETURN_IF_ERROR(ParseDuration("lease", flags.lease, config.control.lease));
  RETURN_IF_ERROR(ParseDuration("interval", flags.interval, config.control.interval));
  const std::optional<LogLevel> level = ParseLogLevel(flags.log_level);
  if (!level.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("--log-level is \"", flags.log_level,
                                                   "\", none of debug, info, warning, error"));
  }
  config.log_level = *level;
  config.control.shadow = flags.shadow;
  config.control.controller_id =
      flags.controller_id.empty() ? DefaultControllerId() : flags.controller_id;
  return config.control.Validate();
}

std::string Print(const Config& config) {
  const PolicyOptions& policy = config.control.policy;
  std::string text =
      absl::StrCat("worker = ", config.worker_address, "\nmetrics-listen = ", config.metrics_listen,
                   "\ncontroller-id = ", config.control.controller_id,
                   "\nlease = ", absl::FormatDuration(config.control.lease),
                   "\ninterval = ", absl::FormatDuration(config.control.interval),
                   "\nshadow = ", config.control.shadow ? "true" : "false",
                   "\nhysteresis = ", policy.hysteresis);
  absl::StrAppend(&text, "\nmax-loss = ", policy.max_loss, "\nmax-change = ", policy.max_change,
                  "\nguard = ", policy.guard, "\nmin-steps = ", policy.min_steps, "\npin-share = ",
                  policy.pin_share.has_value() ? absl::StrCat(*policy.pin_share) : "none",
                  "\ndecision-log = ", config.decision_log.empty() ? "none" : config.decision_log,
                  "\ndecision-log-mib = ", config.decision_log_bytes >> 20,
                  "\nlog-level = ", LogLevelName(config.log_level), "\n");
  return text;
}

}  // namespace

ParsedConfig ParseConfig(const std::vector<std::string>& args) {
  CLI::App app("Watches a WriteScope worker's steps and pushes the CPU's share of the attention.",
               "writescope-controller");
  Flags flags;
  Config config;
  double pin_share = 0;
  AddFlags(app, flags);
  AddPolicyFlags(app, config.control.policy, pin_share);
  if (const auto leave = Parse(app, args)) return {std::nullopt, leave->first, leave->second};
  if (app.count("--pin-share") > 0) config.control.policy.pin_share = pin_share;
  if (const absl::Status status = Check(flags, config); !status.ok()) {
    return {std::nullopt, absl::StrCat(status.message(), "\n"), kUsageExit};
  }
  if (flags.print_config) return {std::nullopt, Print(config), 0};
  return {std::move(config), "", 0};
}

ParsedReplayConfig ParseReplayConfig(const std::vector<std::string>& args) {
  CLI::App app("Makes the decisions of a decision log again with other settings, and compares.",
               "writescope-replay");
  ReplayConfig config;
  config.rows = 40;
  double pin_share = 0;
  app.add_option("log", config.path, "Decision log of writescope-controller")->required();
  app.add_option("--rows", config.rows, "Rows to print, evenly picked; 0: all")
      ->capture_default_str();
  AddPolicyFlags(app, config.policy, pin_share);
  app.set_version_flag("--version", std::string("writescope-replay ") + kVersion);
  if (const auto leave = Parse(app, args)) return {std::nullopt, leave->first, leave->second};
  if (app.count("--pin-share") > 0) config.policy.pin_share = pin_share;
  absl::Status status = config.policy.Validate();
  if (status.ok() && config.rows < 0) {
    status = absl::InvalidArgumentError(absl::StrCat("--rows is ", config.rows));
  }
  if (!status.ok()) return {std::nullopt, absl::StrCat(status.message(), "\n"), kUsageExit};
  return {std::move(config), "", 0};
}

}  // namespace writescope::controller
