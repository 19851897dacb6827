// writescope-bench: the real engine on real model shapes. `decode` measures steps, `prefill` the
// reading of prompts, `throttle` and `retention` steps while the load changes, `chat` a short
// sequence beside long ones; `timeline` draws a step.
#include <cstdio>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "engine/base/command_line.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"
#include "tests/bench/engine_bench/decode_bench.h"
#include "tests/bench/engine_bench/drift_bench.h"
#include "tests/bench/engine_bench/prefill_bench.h"
#include "tests/bench/engine_bench/timeline.h"

namespace writescope::bench {
namespace {

struct Flags {
  std::string model_shape;
  std::string device = "cuda";
  std::string weights = "int4";
  std::string compute_dtype = "auto";
  std::string kv_dtype = "bf16";
  std::vector<double> vram_budgets_gib = {32};
  double host_budget_gib = 0;
  int max_sequences = 0;
  int prefill_chunk = 0;
  double ring_mib = 0;
  int workers = 0;
  double link_gbps = 0;
  std::vector<std::string> points;
  DecodeOptions decode;
  std::string json;
  std::string svg = "timeline";
};

void AddCommon(CLI::App* app, Flags& flags) {
  app->add_option("--model-shape", flags.model_shape,
                  "Folder with a config.json; weights are "
                  "seeded random values")
      ->required();
  app->add_option("--device", flags.device)->check(CLI::IsMember({"cpu", "cuda"}));
  app->add_option("--weights", flags.weights)->check(CLI::IsMember({"bf16", "int4"}));
  app->add_option("--compute-dtype", flags.compute_dtype)
      ->check(CLI::IsMember({"auto", "f32", "bf16"}));
  app->add_option("--kv-dtype", flags.kv_dtype)->check(CLI::IsMember({"bf16", "f32"}));
  app->add_option("--vram-budget-gib", flags.vram_budgets_gib,
                  "prefill: several are measured one after the other")
      ->expected(1, app->get_name() == "prefill" ? CLI::detail::expected_max_vector_size : 1);
  app->add_option("--host-budget-gib", flags.host_budget_gib, "0: half of what the machine allows");
  app->add_option("--prefill-chunk", flags.prefill_chunk, "0: the engine's default");
  app->add_option("--ring-mib", flags.ring_mib, "0: the engine's default");
  app->add_option("--workers", flags.workers, "0: usable cores - 2");
  app->add_option("--link-gbps", flags.link_gbps, "CPU device: pace of the simulated link");
  app->add_option("--point", flags.points, "BATCHxCONTEXT, such as 16x8K; may be repeated")
      ->required();
  app->add_option("--json", flags.json, "Writes the results there");
}

runtime::EngineOptions EngineOptionsOf(const Flags& flags, double vram_budget_gib,
                                       const std::vector<Point>& points, int more_sequences) {
  runtime::EngineOptions options;
  options.model_dir = flags.model_shape;
  options.load_format = runtime::LoadFormat::kDummy;
  options.weights =
      flags.weights == "int4" ? runtime::WeightsFormat::kInt4 : runtime::WeightsFormat::kSource;
  options.device = flags.device == "cuda" ? runtime::DeviceKind::kCuda : runtime::DeviceKind::kCpu;
  if (flags.compute_dtype == "f32") options.compute_dtype = runtime::ComputeDtype::kF32;
  if (flags.compute_dtype == "bf16") options.compute_dtype = runtime::ComputeDtype::kBf16;
  options.kv_dtype = flags.kv_dtype == "f32" ? KvDtype::kF32 : KvDtype::kBf16;
  options.vram_budget_bytes = static_cast<int64_t>(vram_budget_gib * kGiB);
  options.host_budget_bytes = static_cast<int64_t>(flags.host_budget_gib * kGiB);
  options.prefill_chunk_tokens = flags.prefill_chunk;
  options.ring_bytes = static_cast<int64_t>(flags.ring_mib * kMiB);
  options.cpu_workers = flags.workers;
  options.link_bytes_per_s = flags.link_gbps * 1e9;
  options.prefix_cache = false;
  options.max_sequences = 1;
  for (const Point& point : points) {
    options.max_sequences = std::max(options.max_sequences, point.batch + more_sequences);
  }
  return options;
}

// Of steps that are all taken in one or all in two micro-batches.
int Number(const DecodeOptions& options) { return options.micro_batches[0] == "2" ? 2 : 1; }

// The rows of a benchmark of steps, by its name.
absl::StatusOr<std::vector<ResultRow>> RunSteps(BenchRig& rig, const std::string& benchmark,
                                                const std::vector<Point>& points,
                                                DecodeOptions options) {
  if (benchmark == "decode") {
    options.points = points;
    return RunDecode(rig, options);
  }
  std::vector<ResultRow> all;
  for (const Point& point : points) {
    absl::StatusOr<std::vector<ResultRow>> rows =
        benchmark == "throttle" ? RunThrottle(rig, point, options.cuts[0], Number(options))
        : benchmark == "chat"   ? RunChat(rig, point)
                                : RunRetention(rig, point);
    RETURN_IF_ERROR(rows.status());
    all.insert(all.end(), rows->begin(), rows->end());
  }
  return all;
}

// Adds to the file what one budget gives.
absl::Status RunWithBudget(const Flags& flags, const std::string& benchmark, double vram_budget_gib,
                           ResultFile* file) {
  std::vector<Point> points;
  for (const std::string& text : flags.points) {
    ASSIGN_OR_RETURN(points.emplace_back(), ParsePoint(text));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<BenchRig> rig,
                   BenchRig::Create(EngineOptionsOf(flags, vram_budget_gib, points,
                                                    benchmark == "chat" ? 1 : 0)));
  std::printf("%s", rig->sized().plan.ToString().c_str());
  const roofline::Rates& rates = rig->profile().rates;
  std::printf("rates, GB/s: c0 %.1f c1 %.1f p0 %.1f p1 %.1f, %d workers\n", rates.cpu_alone / 1e9,
              rates.cpu_with_link / 1e9, rates.link_alone / 1e9, rates.link_with_cpu / 1e9,
              rig->profile().cpu_workers);
  const roofline::Rates& raw = rig->raw_rates();
  std::printf("by plain reading:  c0 %.1f c1 %.1f p0 %.1f p1 %.1f\n", raw.cpu_alone / 1e9,
              raw.cpu_with_link / 1e9, raw.link_alone / 1e9, raw.link_with_cpu / 1e9);
  std::fflush(stdout);
  file->machine = DescribeMachine(rig->device().description());
  file->profile = rig->profile();
  file->raw_rates = rig->raw_rates();
  if (benchmark == "prefill") {
    ASSIGN_OR_RETURN(const std::vector<PrefillRow> rows, RunPrefill(*rig, points));
    file->prefill_rows.insert(file->prefill_rows.end(), rows.begin(), rows.end());
    return absl::OkStatus();
  }
  if (benchmark == "timeline") {
    for (const Point& point : points) {
      const std::string path =
          absl::StrCat(flags.svg, "-", point.batch, "x", point.context, ".svg");
      ASSIGN_OR_RETURN(const std::string text,
                       WriteTimeline(*rig, point, Number(flags.decode), path));
      std::printf("%s", text.c_str());
    }
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(file->rows, RunSteps(*rig, benchmark, points, flags.decode));
  return absl::OkStatus();
}

absl::Status Run(const Flags& flags, const std::string& benchmark, const std::string& command) {
  ResultFile file;
  file.benchmark = benchmark;
  file.command = command;
  for (const double vram_budget_gib : flags.vram_budgets_gib) {
    RETURN_IF_ERROR(RunWithBudget(flags, benchmark, vram_budget_gib, &file));
  }
  for (ResultRow& row : file.rows) row.weights = flags.weights;
  for (PrefillRow& row : file.prefill_rows) row.weights = flags.weights;
  if (flags.json.empty() || benchmark == "timeline") return absl::OkStatus();
  return WriteResultFile(file, flags.json);
}

int Main(int argc, char** argv) {
  Flags flags;
  flags.decode.policies = {"hybrid"};
  flags.decode.cuts = {"meet"};
  CLI::App app("Measures the engine on the shapes of real models.", "writescope-bench");
  app.require_subcommand(1);
  CLI::App* decode = app.add_subcommand("decode", "Decode steps of batches at a context length");
  AddCommon(decode, flags);
  decode->add_option("--policy", flags.decode.policies)
      ->check(CLI::IsMember({"hybrid", "stream", "cpu", "static", "plain"}));
  decode->add_option("--cut", flags.decode.cuts)->check(CLI::IsMember({"meet", "planned"}));
  decode
      ->add_option(
          "--micro-batches", flags.decode.micro_batches,
          "hybrid: 1, 2, auto (as a worker chooses by its steps) or several, one after the "
          "other")
      ->check(CLI::IsMember({"1", "2", "auto"}));
  decode->add_option("--steps", flags.decode.steps)->check(CLI::Range(1, 1000));
  decode->add_option("--warmup-steps", flags.decode.warmup_steps)->check(CLI::Range(0, 1000));
  decode->add_flag("--real-prefill", flags.decode.real_prefill,
                   "KV by reading prompts instead of seeded bytes");
  decode->add_flag("--retain", flags.decode.retain, "Keeps copies of streamed blocks");
  decode->add_flag("--kernel-times", flags.decode.kernel_times,
                   "Resident points: the share of the time in which no kernel runs (CUPTI)");
  AddCommon(app.add_subcommand("prefill", "Reading prompts"), flags);
  CLI::App* throttle =
      app.add_subcommand("throttle", "Workers that become half as fast in mid-run");
  AddCommon(throttle, flags);
  throttle->add_option("--cut", flags.decode.cuts)->check(CLI::IsMember({"meet", "planned"}));
  throttle->add_option("--micro-batches", flags.decode.micro_batches[0])
      ->check(CLI::IsMember({"1", "2"}));
  AddCommon(app.add_subcommand("retention", "All sequences of a point but the last leave"), flags);
  AddCommon(app.add_subcommand("chat", "A short sequence on the device beside a point's batch"),
            flags);
  CLI::App* timeline = app.add_subcommand("timeline", "A picture of a step");
  AddCommon(timeline, flags);
  timeline->add_option("--micro-batches", flags.decode.micro_batches[0])
      ->check(CLI::IsMember({"1", "2"}));
  timeline->add_option("--svg", flags.svg, "Files are named by it and the point");
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
  std::string command = "writescope-bench";
  for (int i = 1; i < argc; ++i) absl::StrAppend(&command, " ", argv[i]);
  const absl::Status status = Run(flags, app.get_subcommands()[0]->get_name(), command);
  if (status.ok()) return 0;
  std::fprintf(stderr, "writescope-bench: %s\n", status.ToString().c_str());
  return 1;
}

}  // namespace
}  // namespace writescope::bench

int main(int argc, char** argv) { return writescope::bench::Main(argc, argv); }
