#include "server/config.h"

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
#include "engine/base/address.h"
#include "engine/base/command_line.h"
#include "engine/base/status_macros.h"
#include "engine/base/utf8.h"
#include "server/config_file.h"
#include "server/parse_units.h"
#include "server/version.h"
#include "server/worker_flags.h"

namespace writescope::server {
namespace {

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

// What a check of engine/base/address.h says of the flag's value.
absl::Status CheckAddress(const char* flag, const std::string& wrong) {
  if (wrong.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(flag, ": ", wrong));
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

absl::Status CheckMemory(const WorkerFlags& flags, runtime::EngineOptions* engine) {
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

absl::Status CheckDevice(const WorkerFlags& flags, runtime::EngineOptions* engine) {
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

absl::Status CheckEngine(const WorkerFlags& flags, runtime::EngineOptions* engine) {
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
  RETURN_IF_ERROR(Choose("--micro-batches", flags.micro_batches,
                         {{"auto", runtime::MicroBatching::kAuto},
                          {"1", runtime::MicroBatching::kOne},
                          {"2", runtime::MicroBatching::kTwo}},
                         &engine->micro_batching));
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
  RETURN_IF_ERROR(Take("--request-time-limit", ParseTimeLimit(flags.request_time_limit),
                       &engine->request_time_limit));
  return Take("--progress-interval", ParseTimeSpan(flags.progress_interval),
              &engine->progress_interval);
}

absl::StatusOr<WorkerConfig> Check(const WorkerFlags& flags) {
  WorkerConfig config;
  RETURN_IF_ERROR(CheckEngine(flags, &config.engine));
  RETURN_IF_ERROR(CheckAddress("--listen", CheckListenAddressOrPath(flags.listen)));
  RETURN_IF_ERROR(CheckAddress("--control-listen", CheckListenAddressOrPath(flags.control_listen)));
  if (!flags.metrics_listen.empty()) {
    RETURN_IF_ERROR(CheckAddress("--metrics-listen", CheckListenAddress(flags.metrics_listen)));
  }
  RETURN_IF_ERROR(CheckDistinct({{"--listen", flags.listen},
                                 {"--control-listen", flags.control_listen},
                                 {"--metrics-listen", flags.metrics_listen}}));
  config.listen = flags.listen;
  config.control_listen = flags.control_listen;
  config.metrics_listen = flags.metrics_listen;
  RETURN_IF_ERROR(Choose("--metrics-compat", flags.metrics_compat,
                         {{"none", false}, {"vllm", true}}, &config.vllm_metrics));
  if (!IsWholeUtf8(flags.worker_id)) {
    return absl::InvalidArgumentError("--worker-id: not valid UTF-8, which the API takes names in");
  }
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
  RETURN_IF_ERROR(Take("--stall-limit", ParseTimeLimit(flags.stall_limit), &config.stall_limit));
  if (config.stall_limit < absl::Seconds(1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--stall-limit: ", absl::FormatDuration(config.stall_limit), " is below 1s"));
  }
  RETURN_IF_ERROR(Take("--max-connection-age", ParseTimeLimit(flags.max_connection_age),
                       &config.max_connection_age));
  RETURN_IF_ERROR(Take("--max-connection-age-grace", ParseTimeLimit(flags.max_connection_age_grace),
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

ParsedConfig ParseWorkerConfig(const std::vector<std::string>& arguments) {
  constexpr int kUsageExitCode = 2;
  WorkerFlags flags;
  CLI::App app("Serves one model from one accelerator, with the KV cache spilled to host memory.",
               "writescope-worker");
  app.set_version_flag("--version", absl::StrCat("writescope-worker ", kVersion));
  app.option_defaults()->always_capture_default();
  app.config_formatter(std::make_shared<ConfigFile>());
  app.set_config("--config", "", "Reads options from a file, as --print-config writes them")
      ->check(ConfigFile::Check, "");
  // Otherwise a misspelt key of the file would be a setting that silently is not made.
  app.allow_config_extras(CLI::config_extras_mode::error);
  AddWorkerOptions(app, flags);
  ParsedConfig parsed;
  // CLI11 throws for errors and for --help alike.
  try {
    ParseArguments(app, arguments);
  } catch (const CLI::CallForHelp&) {
    parsed.message = app.help();
    return parsed;
  } catch (const CLI::CallForVersion& version) {
    parsed.message = absl::StrCat(version.what(), "\n");
    return parsed;
  } catch (const CLI::Error& error) {
    parsed.message = absl::StrCat(ConfigFile::Explain(ExplainMistake(app, error)),
                                  "\nwritescope-worker --help lists the flags\n");
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
