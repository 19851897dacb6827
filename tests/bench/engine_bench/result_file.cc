#include "tests/bench/engine_bench/result_file.h"

#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/base/cpu_features.h"
#include "nlohmann/json.hpp"
#include "tests/bench/engine_bench/source_version.h"

namespace writescope::bench {
namespace {

constexpr double kGiga = 1e9;

nlohmann::json ToJson(const ResultRow& row) {
  nlohmann::json json = {{"model", row.model},
                         {"weights", row.weights},
                         {"batch", row.batch},
                         {"context_tokens", row.context_tokens},
                         {"aggregate_tokens", row.aggregate_tokens},
                         {"policy", row.policy},
                         {"cut", row.cut},
                         {"micro_batches", row.micro_batches},
                         {"share", row.share},
                         {"spilled_bytes", row.spilled_bytes},
                         {"step_ms", row.step_ms},
                         {"step_ms_min", row.step_ms_min},
                         {"step_ms_max", row.step_ms_max},
                         {"floor_ms", row.floor_ms},
                         {"floor_raw_ms", row.floor_raw_ms},
                         {"dense_ms", row.dense_ms},
                         {"tokens_per_s", row.tokens_per_s},
                         {"moved_bytes", row.moved_bytes},
                         {"device_bytes_peak", row.device_bytes_peak},
                         {"host_bytes_peak", row.host_bytes_peak},
                         {"kv_fill", row.kv_fill},
                         {"resident", row.resident},
                         {"cpu_busy_ms", row.cpu_busy_ms},
                         {"link_busy_ms", row.link_busy_ms},
                         {"both_busy_ms", row.both_busy_ms},
                         {"gap_ms", row.gap_ms},
                         {"link_wait_ms", row.link_wait_ms},
                         {"device_attention_ms", row.device_attention_ms},
                         {"copies", row.copies},
                         {"handoff_out_us", row.handoff_out_us},
                         {"handoff_out_p99_us", row.handoff_out_p99_us},
                         {"handoff_back_us", row.handoff_back_us},
                         {"handoff_back_p99_us", row.handoff_back_p99_us}};
  if (row.is_auto) {
    json["micro_batches_asked"] = "auto";
    json["steps"] = row.steps;
    json["steps_in_two"] = row.steps_in_two;
  }
  if (row.half_dense_ms > 0) json["half_dense_ms"] = row.half_dense_ms;
  if (row.rates.cpu_with_link > 0) {
    json["c1_gbps"] = row.rates.cpu_with_link / kGiga;
    json["p1_gbps"] = row.rates.link_with_cpu / kGiga;
    json["raw_c1_gbps"] = row.raw_rates.cpu_with_link / kGiga;
    json["raw_p1_gbps"] = row.raw_rates.link_with_cpu / kGiga;
  }
  if (row.kernels > 0) {
    json["kernels"] = row.kernels;
    json["gpu_busy_ms"] = row.gpu_busy_ms;
    json["gpu_idle_share"] = row.gpu_idle_share;
  }
  return json;
}

nlohmann::json ToJson(const PrefillRow& row) {
  return {{"model", row.model},
          {"weights", row.weights},
          {"batch", row.batch},
          {"context_tokens", row.context_tokens},
          {"aggregate_tokens", row.aggregate_tokens},
          {"chunk_tokens", row.chunk_tokens},
          {"vram_budget_bytes", row.vram_budget_bytes},
          {"kv_bytes", row.kv_bytes},
          {"spilled_bytes", row.spilled_bytes},
          {"seconds", row.seconds},
          {"tokens_per_s", row.tokens_per_s},
          {"attention_s", row.attention_s},
          {"attention_tflops", row.attention_tflops},
          {"dense_s", row.dense_s},
          {"link_bytes", row.link_bytes},
          {"link_busy_s", row.link_busy_s},
          {"link_wait_share", row.link_wait_share},
          {"moved_bytes", row.moved_bytes},
          {"device_bytes_peak", row.device_bytes_peak},
          {"host_bytes_peak", row.host_bytes_peak}};
}

}  // namespace

std::string DescribeMachine(const std::string& accelerator) {
  std::ifstream info("/proc/cpuinfo");
  std::string model = "unknown CPU";
  for (std::string line; std::getline(info, line);) {
    absl::string_view text = line;
    if (!absl::ConsumePrefix(&text, "model name")) continue;
    model = std::string(text.substr(text.find(':') + 2));
    break;
  }
  return absl::StrCat(accelerator, ", ", UsableCores(), " cores of ", model);
}

absl::Status WriteResultFile(const ResultFile& file, const std::string& path) {
  const roofline::Rates& rates = file.profile.rates;
  const roofline::Rates& raw = file.raw_rates;
  nlohmann::json json = {{"benchmark", file.benchmark},
                         {"machine", file.machine},
                         {"commit", kCommit},
                         {"engine_hash", kEngineHash},
                         {"command", file.command},
                         {"ceilings",
                          {{"c0_gbps", rates.cpu_alone / kGiga},
                           {"c1_gbps", rates.cpu_with_link / kGiga},
                           {"p0_gbps", rates.link_alone / kGiga},
                           {"p1_gbps", rates.link_with_cpu / kGiga},
                           {"workers", file.profile.cpu_workers},
                           {"raw_c0_gbps", raw.cpu_alone / kGiga},
                           {"raw_c1_gbps", raw.cpu_with_link / kGiga},
                           {"raw_p0_gbps", raw.link_alone / kGiga},
                           {"raw_p1_gbps", raw.link_with_cpu / kGiga},
                           {"device_gbps", rates.device / kGiga}}},
                         {"rows", nlohmann::json::array()}};
  for (const ResultRow& row : file.rows) json["rows"].push_back(ToJson(row));
  for (const PrefillRow& row : file.prefill_rows) json["rows"].push_back(ToJson(row));
  std::ofstream out(path);
  out << json.dump(1) << "\n";
  if (!out) return absl::InternalError(absl::StrCat("cannot write ", path));
  return absl::OkStatus();
}

}  // namespace writescope::bench
