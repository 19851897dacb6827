#include "server/config.h"

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <memory>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/base/command_line.h"
#include "engine/base/status_macros.h"
#include "server/config_file.h"
#include "server/parse_units.h"
#include "server/version.h"

namespace writescope::server {
namespace {

// As typed; Check turns it into a WorkerConfig. The start values are the defaults that --help
// shows.
struct Flags {
  std::string model;
  std::string device = "cpu";
  std::string load_format = "checkpoint";
  std::string weights = "bf16";
  std::string compute_dtype = "auto";
  std::string device_waits = "auto";
  bool force_simt = false;
  bool allow_pageable = false;
  std::string listen = "127.0.0.1:50051";
  std::string control_listen = "127.0.0.1:50052";
  std::string metrics_listen = "127.0.0.1:9464";
  std::string metrics_compat = "none";
  std::string worker_id;
  std::string vram_budget;
  std::string host_budget;
  std::string kv_dtype = "bf16";
  int max_context = 0;
  int max_sequences = 16;
  int max_queue = 256;
  int prefill_chunk = 0;
  int step_graphs = 16;
  std::string ring_size;
  int workers = 0;
  int device_threads = 0;
  std::string cut = "meet";
  std::string share_interval = "0,1";
  double link_gbps = 0;
  bool no_prefix_cache = false;
  bool no_retention = false;
  std::string machine_profile;
  std::string wait_limit = "2s";
  std::string request_time_limit = "inf";
  std::string progress_interval = "1s";
  std::string max_request_size = "64MiB";
  std::string stream_buffer = "1MiB";
  std::string stream_stall_limit = "10s";
  std::string drain_timeout = "2m";
  std::string shutdown_grace = "5s";
  std::string stall_limit = "2m";
  std::string max_connection_age = "30m";
  std::string max_connection_age_grace = "24h";
  std::string log_level = "info";
  bool plan_only = false;
  bool print_config = false;
};

void AddModelOptions(CLI::App& app, Flags& flags) {
  app.add_option("--model", flags.model, "Folder of a Hugging Face checkpoint, as downloaded")
      ->group("Model");
  app.add_option("--device", flags.device, "cpu, cuda, or cuda:N for the N-th visible GPU")
      ->group("Model");
  app.add_option("--load-format", flags.load_format,
                 "checkpoint, or dummy: seeded random weights of the shapes in config.json")
      ->group("Model");
  app.add_option("--weights", flags.weights,
                 "bf16 (as in the checkpoint), or int4: routed experts are quantised on load")
      ->group("Model");
  app.add_option("--compute-dtype", flags.compute_dtype,
                 "auto, f32 or bf16 (CUDA); auto: bf16 on CUDA, f32 on the CPU device")
      ->group("Model");
  app.add_option("--vram-budget", flags.vram_budget,
                 "All that the worker takes of device memory, such as 32GiB (required)")
      ->group("Memory");
  app.add_option("--host-budget", flags.host_budget,
                 "All KV memory on the host; default: half of what cgroup and machine allow")
      ->group("Memory");
  app.add_option("--kv-dtype", flags.kv_dtype, "bf16 or f32")->group("Memory");
  app.add_option("--max-context", flags.max_context,
                 "Tokens of prompt and answer together; 0: the model's, cut to what fits")
      ->group("Memory");
  app.add_option("--ring-size", flags.ring_size,
                 "Staging memory on the device; default: 256MiB, less on the CPU device")
      ->group("Memory");
  app.add_flag("--allow-pageable", flags.allow_pageable,
               "Goes on, many times slower, where host memory cannot be page-locked (CUDA)")
      ->group("Memory");
  app.add_flag("--no-prefix-cache", flags.no_prefix_cache, "Keeps nothing for later requests")
      ->group("Memory");
  app.add_flag("--no-retention", flags.no_retention,
               "Keeps no copies of spilled blocks in free device memory")
      ->group("Memory");
  app.add_option("--max-sequences", flags.max_sequences, "Requests computed at once")
      ->group("Scheduling");
  app.add_option("--max-queue", flags.max_queue, "Requests that may wait")->group("Scheduling");
  app.add_option("--prefill-chunk", flags.prefill_chunk,
                 "Prompt tokens per step; 0: 2048 on CUDA, 512 on the CPU device")
      ->group("Scheduling");
  app.add_option(
         "--step-graphs", flags.step_graphs,
         "CUDA: shapes of decode steps that are kept as graphs: batch sizes; with spilled KV "
         "they count for three. 0: none")
      ->group("Scheduling");
  app.add_option("--request-time-limit", flags.request_time_limit,
                 "A request that takes longer ends with TIME_LIMIT")
      ->group("Scheduling");
  app.add_option("--progress-interval", flags.progress_interval,
                 "Between progress messages while a prompt is read")
      ->group("Scheduling");
}

void AddSplitOptions(CLI::App& app, Flags& flags) {
  app.add_option("--cut", flags.cut,
                 "planned (reproducible) or meet (self-balancing within a step)")
      ->group("Split");
  app.add_option("--share-interval", flags.share_interval,
                 "CPU shares that can be reached without moving a byte")
      ->group("Split");
  app.add_option("--workers", flags.workers,
                 "Threads of the CPU's attention; 0: usable cores - 2, at least 1")
      ->group("Split");
  app.add_option("--device-threads", flags.device_threads,
                 "Threads that stand in for the GPU on the CPU device; 0: all usable cores")
      ->group("Split");
  app.add_option("--link-gbps", flags.link_gbps,
                 "Pace of the CPU device's simulated link in 10^9 bytes/s; 0: none")
      ->group("Split");
  app.add_option("--machine-profile", flags.machine_profile,
                 "Rates to start with, instead of a measurement (a JSON file)")
      ->group("Split");
  app.add_option("--device-waits", flags.device_waits,
                 "Who waits for the CPU's attention: auto, device, or host (for tools that "
                 "serialise the GPU)")
      ->group("Split");
  app.add_flag("--force-simt", flags.force_simt,
               "CUDA without tensor cores, as on GPUs before sm_80; for tests")
      ->group("Split");
  app.add_option("--wait-limit", flags.wait_limit,
                 "A step that waits longer for one processor fails")
      ->group("Split");
}

void AddServiceOptions(CLI::App& app, Flags& flags) {
  app.add_option("--listen", flags.listen, "GenerationService: host:port or unix:path")
      ->group("Service");
  app.add_option("--control-listen", flags.control_listen,
                 "WorkerControlService: host:port or unix:path; not for clients")
      ->group("Service");
  app.add_option("--metrics-listen", flags.metrics_listen,
                 "Prometheus metrics: host:port; empty: none")
      ->group("Service");
  app.add_option("--metrics-compat", flags.metrics_compat,
                 "none, or vllm: the common metrics under vLLM's names too")
      ->group("Service");
  app.add_option("--worker-id", flags.worker_id, "Default: host name and process id")
      ->group("Service");
  app.add_option("--max-request-size", flags.max_request_size, "Larger messages are refused")
      ->group("Service");
  app.add_option("--stream-buffer", flags.stream_buffer,
                 "A client this far behind its stream loses it (SLOW_CONSUMER)")
      ->group("Service");
  app.add_option("--stream-stall-limit", flags.stream_stall_limit,
                 "And is cut off if it has not read the rest by then")
      ->group("Service");
  app.add_option("--max-connection-age", flags.max_connection_age,
                 "Then clients are asked to connect anew")
      ->group("Service");
  app.add_option("--max-connection-age-grace", flags.max_connection_age_grace,
                 "And running calls on the old connection are cut after")
      ->group("Service");
  app.add_option("--drain-timeout", flags.drain_timeout,
                 "How long SIGTERM waits for running requests; a second one waits no more")
      ->group("Service");
  app.add_option("--shutdown-grace", flags.shutdown_grace,
                 "For clients to read the end of their streams")
      ->group("Service");
  app.add_option("--stall-limit", flags.stall_limit,
                 "An engine silent for longer is reported as not serving; for five times as long, "
                 "the worker exits")
      ->group("Service");
  app.add_option("--log-level", flags.log_level, "debug, info, warning or error")->group("Service");
  app.add_flag("--plan-only", flags.plan_only, "Prints the memory plan and exits")
      ->configurable(false)
      ->group("Service");
  app.add_flag("--print-config", flags.print_config,
               "Prints the configuration, as --config reads it, and exits")
      ->configurable(false)
      ->group("Service");
}

// Prefixes an error with the flag it is about.
template <typename T>
absl::Status Take(const char* flag, absl::StatusOr<T> value, T* out) {
  if (!value.ok()) {
    return absl::Status(value.status().code(), absl::StrCat(flag, ": ", value.status().message()));
  }
  *out = *std::move(value);
  return absl::OkStatus();
}

absl::Status AtLeast(const char* flag, int value, int least) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(flag, ": ", value, " is below ", least, ", the least allowed"));
}

absl::Status CheckAddress(const char* flag, const std::string& address, bool unix_allowed) {
  if (unix_allowed && absl::StartsWith(address, "unix:") && address.size() > 5) {
    return absl::OkStatus();
  }
  const size_t colon = address.rfind(':');
  int port = -1;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat(flag, ": '", address,
                                                   "' is not host:port with a port in [0, 65535]",
                                                   unix_allowed ? ", nor unix:path" : ""));
  }
  return absl::OkStatus();
}

// Port 0 is another one each time.
absl::Status CheckDistinct(std::initializer_list<std::pair<const char*, std::string>> addresses) {
  absl::flat_hash_map<std::string, const char*> flag_of;
  for (const auto& [flag, address] : addresses) {
    if (address.empty() || absl::EndsWith(address, ":0")) continue;
    const auto [it, inserted] = flag_of.try_emplace(address, flag);
    if (!inserted) {
      return absl::InvalidArgumentError(absl::StrCat(flag, ": '", address, "' is ", it->second,
                                                     "'s too; each needs an address of its own"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckMemory(const Flags& flags, runtime::EngineOptions* engine) {
  if (flags.vram_budget.empty()) {
    return absl::InvalidArgumentError(
        "--vram-budget is required: all that the worker may take of device memory, such as 32GiB");
  }
  RETURN_IF_ERROR(
      Take("--vram-budget", ParseByteSize(flags.vram_budget), &engine->vram_budget_bytes));
  if (engine->vram_budget_bytes == 0) {
    return absl::InvalidArgumentError("--vram-budget: 0 bytes hold no weights");
  }
  if (!flags.host_budget.empty()) {
    RETURN_IF_ERROR(
        Take("--host-budget", ParseByteSize(flags.host_budget), &engine->host_budget_bytes));
    // To the engine 0 is "not given".
    if (engine->host_budget_bytes == 0) {
      return absl::InvalidArgumentError(
          "--host-budget: 0 bytes; queries and logits need a few MiB even where no KV is spilled");
    }
  }
  if (!flags.ring_size.empty()) {
    RETURN_IF_ERROR(Take("--ring-size", ParseByteSize(flags.ring_size), &engine->ring_bytes));
  }
  if (flags.kv_dtype != "bf16" && flags.kv_dtype != "f32") {
    return absl::InvalidArgumentError(
        absl::StrCat("--kv-dtype: '", flags.kv_dtype, "' is neither bf16 nor f32"));
  }
  engine->kv_dtype = flags.kv_dtype == "bf16" ? KvDtype::kBf16 : KvDtype::kF32;
  RETURN_IF_ERROR(AtLeast("--max-context", flags.max_context, 0));
  engine->max_context_tokens = flags.max_context;
  engine->prefix_cache = !flags.no_prefix_cache;
  engine->retention = !flags.no_retention;
  return absl::OkStatus();
}

// One of a flag's words.
template <typename T>
absl::Status Choose(const char* flag, const std::string& word,
                    std::initializer_list<std::pair<const char*, T>> choices, T* out) {
  std::string known;
  for (const auto& [name, value] : choices) {
    if (word == name) {
      *out = value;
      return absl::OkStatus();
    }
    absl::StrAppend(&known, known.empty() ? "" : ", ", name);
  }
  return absl::InvalidArgumentError(absl::StrCat(flag, ": '", word, "' is none of ", known));
}

absl::Status CheckDevice(const Flags& flags, runtime::EngineOptions* engine) {
  using runtime::ComputeDtype;
  using runtime::DeviceWaits;
  using runtime::LoadFormat;
  using runtime::WeightsFormat;
  absl::string_view device = flags.device;
  if (absl::ConsumePrefix(&device, "cuda")) {
    engine->device = runtime::DeviceKind::kCuda;
    if (!device.empty() &&
        (!absl::ConsumePrefix(&device, ":") || !absl::SimpleAtoi(device, &engine->device_ordinal) ||
         engine->device_ordinal < 0)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--device: '", flags.device, "' is neither cuda nor cuda:N"));
    }
  } else if (device == "cpu") {
    engine->device = runtime::DeviceKind::kCpu;
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("--device: '", flags.device, "' is neither cpu nor cuda"));
  }
  RETURN_IF_ERROR(Choose("--load-format", flags.load_format,
                         {{"checkpoint", LoadFormat::kCheckpoint}, {"dummy", LoadFormat::kDummy}},
                         &engine->load_format));
  RETURN_IF_ERROR(Choose("--weights", flags.weights,
                         {{"bf16", WeightsFormat::kSource}, {"int4", WeightsFormat::kInt4}},
                         &engine->weights));
  RETURN_IF_ERROR(Choose(
      "--compute-dtype", flags.compute_dtype,
      {{"auto", ComputeDtype::kAuto}, {"f32", ComputeDtype::kF32}, {"bf16", ComputeDtype::kBf16}},
      &engine->compute_dtype));
  RETURN_IF_ERROR(Choose("--device-waits", flags.device_waits,
                         {{"auto", DeviceWaits::kAuto},
                          {"device", DeviceWaits::kDevice},
                          {"host", DeviceWaits::kHost}},
                         &engine->device_waits));
  engine->force_simt = flags.force_simt;
  engine->max_step_graphs = flags.step_graphs;
  engine->allow_pageable = flags.allow_pageable;
  return absl::OkStatus();
}

absl::Status CheckEngine(const Flags& flags, runtime::EngineOptions* engine) {
  if (flags.model.empty()) {
    return absl::InvalidArgumentError("--model is required: the folder of a checkpoint");
  }
  engine->model_dir = flags.model;
  RETURN_IF_ERROR(CheckDevice(flags, engine));
  RETURN_IF_ERROR(CheckMemory(flags, engine));
  RETURN_IF_ERROR(AtLeast("--max-sequences", flags.max_sequences, 1));
  RETURN_IF_ERROR(AtLeast("--max-queue", flags.max_queue, 1));
  RETURN_IF_ERROR(AtLeast("--prefill-chunk", flags.prefill_chunk, 0));
  RETURN_IF_ERROR(AtLeast("--workers", flags.workers, 0));
  RETURN_IF_ERROR(AtLeast("--device-threads", flags.device_threads, 0));
  engine->max_sequences = flags.max_sequences;
  engine->max_queue = flags.max_queue;
  engine->prefill_chunk_tokens = flags.prefill_chunk;
  engine->cpu_workers = flags.workers;
  engine->device_threads = flags.device_threads;
  if (flags.cut != "planned" && flags.cut != "meet") {
    return absl::InvalidArgumentError(
        absl::StrCat("--cut: '", flags.cut, "' is neither planned nor meet"));
  }
  engine->cut = flags.cut == "planned" ? runtime::CutMode::kPlanned : runtime::CutMode::kMeet;
  ShareBounds bounds;
  RETURN_IF_ERROR(Take("--share-interval", ParseShareBounds(flags.share_interval), &bounds));
  engine->min_cpu_share = bounds.min_share;
  engine->max_cpu_share = bounds.max_share;
  constexpr double kLeastGbps = kMinLinkBytesPerS / 1e9;
  if (flags.link_gbps != 0 && !(flags.link_gbps >= kLeastGbps && flags.link_gbps <= 1e6)) {
    return absl::InvalidArgumentError(absl::StrCat("--link-gbps: ", flags.link_gbps,
                                                   " is neither 0, no pace, nor in [", kLeastGbps,
                                                   ", 1e6]"));
  }
  engine->link_bytes_per_s = flags.link_gbps * 1e9;
  if (!flags.machine_profile.empty()) {
    roofline::MachineProfile profile;
    RETURN_IF_ERROR(
        Take("--machine-profile", roofline::ReadMachineProfile(flags.machine_profile), &profile));
    engine->machine_profile = std::move(profile);
  }
  RETURN_IF_ERROR(Take("--wait-limit", ParseTimeSpan(flags.wait_limit), &engine->wait_limit));
  if (engine->wait_limit == absl::ZeroDuration()) {
    return absl::InvalidArgumentError("--wait-limit: 0s would fail every step that waits");
  }
  RETURN_IF_ERROR(Take("--request-time-limit", ParseTimeSpan(flags.request_time_limit, true),
                       &engine->request_time_limit));
  return Take("--progress-interval", ParseTimeSpan(flags.progress_interval),
              &engine->progress_interval);
}

absl::StatusOr<WorkerConfig> Check(const Flags& flags) {
  WorkerConfig config;
  RETURN_IF_ERROR(CheckEngine(flags, &config.engine));
  RETURN_IF_ERROR(CheckAddress("--listen", flags.listen, true));
  RETURN_IF_ERROR(CheckAddress("--control-listen", flags.control_listen, true));
  if (!flags.metrics_listen.empty()) {
    RETURN_IF_ERROR(CheckAddress("--metrics-listen", flags.metrics_listen, false));
  }
  RETURN_IF_ERROR(CheckDistinct({{"--listen", flags.listen},
                                 {"--control-listen", flags.control_listen},
                                 {"--metrics-listen", flags.metrics_listen}}));
  config.listen = flags.listen;
  config.control_listen = flags.control_listen;
  config.metrics_listen = flags.metrics_listen;
  RETURN_IF_ERROR(Choose("--metrics-compat", flags.metrics_compat,
                         {{"none", false}, {"vllm", true}}, &config.vllm_metrics));
  config.worker_id = flags.worker_id;
  RETURN_IF_ERROR(
      Take("--max-request-size", ParseByteSize(flags.max_request_size), &config.max_request_bytes));
  if (config.max_request_bytes < kMiB || config.max_request_bytes > kGiB) {
    return absl::InvalidArgumentError(absl::StrCat("--max-request-size: ", config.max_request_bytes,
                                                   " bytes are not in [1MiB, 1GiB]"));
  }
  RETURN_IF_ERROR(
      Take("--stream-buffer", ParseByteSize(flags.stream_buffer), &config.stream_buffer_bytes));
  RETURN_IF_ERROR(Take("--stream-stall-limit", ParseTimeSpan(flags.stream_stall_limit),
                       &config.stream_stall_limit));
  RETURN_IF_ERROR(
      Take("--drain-timeout", ParseTimeSpan(flags.drain_timeout), &config.drain_timeout));
  RETURN_IF_ERROR(
      Take("--shutdown-grace", ParseTimeSpan(flags.shutdown_grace), &config.shutdown_grace));
  RETURN_IF_ERROR(
      Take("--stall-limit", ParseTimeSpan(flags.stall_limit, true), &config.stall_limit));
  if (config.stall_limit < absl::Seconds(1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--stall-limit: ", absl::FormatDuration(config.stall_limit), " is below 1s"));
  }
  RETURN_IF_ERROR(Take("--max-connection-age", ParseTimeSpan(flags.max_connection_age, true),
                       &config.max_connection_age));
  RETURN_IF_ERROR(Take("--max-connection-age-grace",
                       ParseTimeSpan(flags.max_connection_age_grace, true),
                       &config.max_connection_age_grace));
  const std::optional<LogLevel> level = ParseLogLevel(flags.log_level);
  if (!level.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("--log-level: '", flags.log_level,
                                                   "' is none of debug, info, warning and error"));
  }
  config.log_level = *level;
  config.plan_only = flags.plan_only;
  return config;
}

}  // namespace

ParsedConfig ParseWorkerConfig(std::vector<std::string> arguments) {
  constexpr int kUsageExitCode = 2;
  Flags flags;
  CLI::App app("Serves one model from one accelerator, with the KV cache spilled to host memory.",
               "writescope-worker");
  app.set_version_flag("--version", absl::StrCat("writescope-worker ", kVersion));
  app.option_defaults()->always_capture_default();
  app.config_formatter(std::make_shared<ConfigFile>());
  app.set_config("--config", "", "Reads options from a file, as --print-config writes them");
  // Otherwise a misspelt key of the file would be a setting that silently is not made.
  app.allow_config_extras(CLI::config_extras_mode::error);
  AddModelOptions(app, flags);
  AddSplitOptions(app, flags);
  AddServiceOptions(app, flags);
  ParsedConfig parsed;
  // CLI11 throws for errors and for --help alike, and takes the arguments from the back.
  try {
    arguments = WithEmptyValues(arguments);
    std::reverse(arguments.begin(), arguments.end());
    app.parse(std::move(arguments));
  } catch (const CLI::CallForHelp&) {
    parsed.message = app.help();
    return parsed;
  } catch (const CLI::CallForVersion& version) {
    parsed.message = absl::StrCat(version.what(), "\n");
    return parsed;
  } catch (const CLI::Error& error) {
    parsed.message = absl::StrCat(error.what(), "\nwritescope-worker --help lists the flags\n");
    parsed.exit_code = kUsageExitCode;
    return parsed;
  }
  absl::StatusOr<WorkerConfig> config = Check(flags);
  if (!config.ok()) {
    parsed.message = absl::StrCat(config.status().message(), "\n");
    parsed.exit_code = kUsageExitCode;
    return parsed;
  }
  if (flags.print_config) {
    parsed.message = app.config_to_str(/*default_also=*/true, /*write_description=*/false);
    return parsed;
  }
  parsed.config = *std::move(config);
  return parsed;
}

}  // namespace writescope::server
