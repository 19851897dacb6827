// writescope-doctor: measures this machine and says how to start a worker on it. `writescope
// doctor` runs it.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "engine/base/command_line.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"
#include "engine/roofline/machine_profile.h"
#include "engine/runtime/accelerator.h"
#include "engine/runtime/machine_probe.h"
#include "server/parse_units.h"

namespace writescope::server {
namespace {

// Larger than the last-level cache of any socket, so that memory is measured.
constexpr int64_t kHostBytes = 2 * kGiB;
constexpr int64_t kCpuDeviceHostBytes = 256 * kMiB;
constexpr int64_t kDeviceBytes = 64 * kMiB;

struct Flags {
  std::string device = "cuda";
  std::string vram_budget = "32GiB";
  std::string shape = "qwen3";
  std::string profile;
  double link_gbps = 0;
};

// The attention of a known model: what the CPU's rate depends on.
runtime::MachineProbeOptions ProbeOptions(const Flags& flags) {
  runtime::MachineProbeOptions options;
  if (flags.shape == "mixtral") {
    options.geometry = {.num_kv_heads = 8, .k_dim = 128, .v_dim = 128};
    options.query_group = 4;
  } else if (flags.shape == "deepseek-v2-lite") {
    options.geometry = {.num_kv_heads = 1, .k_dim = 576, .v_dim = 512, .value_in_key = true};
    options.query_group = 16;
  } else {
    options.geometry = {.num_kv_heads = 4, .k_dim = 128, .v_dim = 128};
    options.query_group = 8;
  }
  options.host_bytes = flags.device == "cuda" ? kHostBytes : kCpuDeviceHostBytes;
  options.device_bytes = kDeviceBytes;
  return options;
}

absl::Status Run(const Flags& flags) {
  runtime::EngineOptions options;
  options.device = flags.device == "cuda" ? runtime::DeviceKind::kCuda : runtime::DeviceKind::kCpu;
  ASSIGN_OR_RETURN(options.vram_budget_bytes, ParseByteSize(flags.vram_budget));
  options.device_threads = 1;
  options.link_bytes_per_s = flags.link_gbps * 1e9;
  ASSIGN_OR_RETURN(const std::unique_ptr<device::Device> device, runtime::CreateDevice(options));
  ASSIGN_OR_RETURN(const runtime::Diagnosis diagnosis,
                   runtime::Diagnose(*device, ProbeOptions(flags), options.vram_budget_bytes));
  std::fputs(diagnosis.ToString().c_str(), stdout);
  if (flags.profile.empty()) return absl::OkStatus();
  std::ofstream out(flags.profile);
  out << roofline::MachineProfileToJson(diagnosis.profile) << "\n";
  out.close();  // What is still buffered may be what does not fit the disk.
  if (!out) {
    return absl::InternalError(
        absl::StrCat("cannot write ", flags.profile, ": ", std::strerror(errno)));
  }
  std::printf("and --machine-profile=%s\n", flags.profile.c_str());
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Measures this machine and says how to start a worker on it.", "writescope doctor");
  app.option_defaults()->always_capture_default();
  app.add_option("--device", flags.device)->check(CLI::IsMember({"cpu", "cuda"}));
  // CLI11 checks it while it parses, with our own message.
  const auto check_size = [](const std::string& text) -> std::string {
    const absl::StatusOr<int64_t> bytes = ParseByteSize(text);
    if (!bytes.ok()) return std::string(bytes.status().message());
    return *bytes > 0 ? "" : "it has to be above 0";
  };
  app.add_option("--vram-budget", flags.vram_budget, "What the worker is to have")
      ->check(check_size, "");
  app.add_option("--shape", flags.shape, "Whose attention the CPU is measured with")
      ->check(CLI::IsMember({"qwen3", "mixtral", "deepseek-v2-lite"}));
  app.add_option("--link-gbps", flags.link_gbps, "CPU device: pace of its simulated link")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--write-profile", flags.profile, "Writes the measured machine profile there");
  // CLI11 throws for errors and for --help alike.
  try {
    ParseArguments(app, {argv + 1, argv + argc});
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    constexpr int kExitUsage = 2;
    std::fprintf(stderr, "%s\nRun with --help for more information.\n",
                 ExplainMistake(app, error).c_str());
    return kExitUsage;
  }
  const absl::Status status = Run(flags);
  if (status.ok()) return 0;
  std::fprintf(stderr, "writescope doctor: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace writescope::server

int main(int argc, char** argv) { return writescope::server::Main(argc, argv); }
