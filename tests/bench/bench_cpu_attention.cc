// How fast the CPU's workers attend to spilled KV, beside how fast the same threads read the same
// memory and do nothing else, alternating in one run: by instruction set, model shape, context and
// number of threads, alone and while copies over the link read the memory too.
//
// With --row-major a kernel for pages of token rows (row_major_attention.h) runs beside each, on as
// many bytes.
//
// It is the workers' own code, from the claim to the merged partial, over as many layers as fit
// into the memory, so that no line is in a cache when its turn comes. --batch is the number of
// sequences that a layer holds, all of the same context: one short sequence shows what a layer
// costs beside its bytes, a batch the kernel.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "engine/attention/cpu_attention.h"
#include "engine/attention/worker_team.h"
#include "engine/base/bf16.h"
#include "engine/base/check.h"
#include "engine/base/cpu_features.h"
#include "engine/device/cpu/cpu_device.h"
#include "engine/kvcache/block_table.h"
#include "nlohmann/json.hpp"
#include "tests/bench/engine_bench/source_version.h"
#include "tests/bench/link_load.h"
#include "tests/bench/raw_read.h"
#include "tests/bench/row_major_attention.h"

namespace writescope::bench {
namespace {

struct Model {
  std::string name;
  KvGeometry kv;
  int num_heads;
};

const std::vector<Model>& Models() {
  static const std::vector<Model> models = {
      {"Mixtral-8x7B", {.num_kv_heads = 8, .k_dim = 128, .v_dim = 128}, 32},
      {"Qwen3-30B-A3B", {.num_kv_heads = 4, .k_dim = 128, .v_dim = 128}, 32},
      {"DeepSeek-V2-Lite",
       {.num_kv_heads = 1, .k_dim = 576, .v_dim = 512, .value_in_key = true},
       16},
  };
  return models;
}

struct Flags {
  std::vector<std::string> isas, models;
  std::vector<int64_t> contexts = {8192, 65536};
  std::vector<int> batches = {1};
  std::vector<int> threads = {UsableCores()};
  int64_t memory_mib = 1024;
  int pairs = 5;
  bool link = false;
  bool row_major = false;
  std::string json;
};

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Runs body(worker) on all workers at once; the seconds from the last start to the last end. It is
// a benchmark's team: in the engine no worker waits for another.
template <typename Body>
double TimeTeam(attention::WorkerTeam& team, const Body& body) {
  std::atomic<int> arrived{0};
  std::vector<double> began(team.num_workers()), ended(team.num_workers());
  team.Start([&](int worker) {
    arrived.fetch_add(1);
    while (arrived.load() < team.num_workers()) __builtin_ia32_pause();
    began[worker] = Now();
    body(worker);
    ended[worker] = Now();
  });
  CHECK(team.AwaitDone(absl::Minutes(5)));
  return *std::max_element(ended.begin(), ended.end()) -
         *std::max_element(began.begin(), began.end());
}

double TimeRawRead(attention::WorkerTeam& team, std::span<const std::byte> memory) {
  constexpr int64_t kClaim = int64_t{1} << 20;
  const auto read = DetectedCpuIsa() >= CpuIsa::kAvx512 ? RawReadAvx512 : RawReadPlain;
  std::atomic<int64_t> next{0};
  std::atomic<uint64_t> sum{0};
  const int64_t size = static_cast<int64_t>(memory.size()) / kClaim * kClaim;
  return TimeTeam(team, [&](int) {
    for (int64_t at; (at = next.fetch_add(kClaim)) < size;) {
      sum.fetch_add(read(memory.data() + at, kClaim), std::memory_order_relaxed);
    }
  });
}

bool HasRowMajor(const Model& model) {
  return DetectedCpuIsa() >= CpuIsa::kAvx512Bf16 && !model.kv.value_in_key &&
         model.kv.k_dim == kRowMajorDim && model.kv.v_dim == kRowMajorDim;
}

// The memory as pages of all KV heads, in claims as large as the workers' own.
double TimeRowMajor(attention::WorkerTeam& team, std::span<const std::byte> memory,
                    const Model& model) {
  const int kv_heads = model.kv.num_kv_heads;
  std::mt19937 rng(2);
  std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(kRowMajorDim)));
  std::vector<std::vector<RowMajorState>> states(static_cast<size_t>(team.num_workers()));
  for (auto& of_worker : states) {
    of_worker.resize(static_cast<size_t>(kv_heads));
    for (RowMajorState& state : of_worker) {
      state = {};
      state.num_rows = model.num_heads / kv_heads;
      std::fill_n(state.m, kMaxRowMajorRows, kernels::kEmptyLse);
      for (auto& row : state.q) {
        for (uint16_t& q : row) q = FloatToBf16(normal(rng));
      }
    }
  }
  constexpr int64_t kClaim = attention::WorkerClaims::kMaxClaimBytes;
  std::atomic<int64_t> next{0};
  const int64_t size = static_cast<int64_t>(memory.size()) / kClaim * kClaim;
  const double seconds = TimeTeam(team, [&](int worker) {
    for (int64_t at; (at = next.fetch_add(kClaim)) < size;) {
      for (int64_t page = at; page < at + kClaim;) {
        for (int head = 0; head < kv_heads; ++head, page += kPageHeadBytes) {
          AttendRowMajor(memory.data() + page, states[worker][head]);
        }
      }
    }
  });
  for (const auto& of_worker : states) CHECK(std::isfinite(of_worker[0].o[0][0]));
  return seconds * static_cast<double>(memory.size()) / static_cast<double>(size);
}

// A step over a full swing region: `batch` sequences of `context_tokens`, as many layers as fit.
class Step {
 public:
  Step(const Model& model, int64_t context_tokens, int batch, int64_t memory_bytes)
      : model_(model), batch_(batch), num_blocks_(batch * (context_tokens / kBlockTokens)) {
    num_layers_ = static_cast<int>(memory_bytes / (num_blocks_ * model.kv.block_bytes()));
    CHECK_GT(num_layers_, 0) << "the memory holds no layer of " << batch << " sequences of "
                             << context_tokens << " tokens";
    device::CpuDeviceOptions options;
    options.budget_bytes = 1 << 20;
    auto device = device::CpuDevice::Create(options);
    CHECK(device.ok()) << device.status();
    device_ = *std::move(device);
    auto blocks = kvcache::BlockTable::Create(
        {.geometry = model.kv, .num_layers = num_layers_, .blocks = {0, 0, num_blocks_, 0}},
        *device_);
    CHECK(blocks.ok()) << blocks.status();
    blocks_.emplace(*std::move(blocks));
    const int blocks_each = static_cast<int>(num_blocks_ / batch);
    for (int i = 0; i < batch; ++i) {
      attention_.runs.swing.Add({.region = kvcache::RegionKind::kSwing,
                                 .first_index = i * blocks_each,
                                 .num_blocks = blocks_each,
                                 .first_reader = i,
                                 .num_readers = 1});
      attention_.runs.readers.push_back(i);
      attention_.rows.push_back({.first_row = i, .num_rows = 1});
    }
    attention_.num_rows = batch;
    turns_ = std::make_unique<attention::TurnProgress[]>(num_layers_);
  }

  std::span<std::byte> memory() const {
    return blocks_->region(kvcache::RegionKind::kSwing).memory();
  }

  // Touched by the threads that will read it.
  void Fill(attention::WorkerTeam& team) {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    std::vector<uint16_t> pattern(1 << 15);
    for (uint16_t& value : pattern) value = FloatToBf16(normal(rng));
    const size_t bytes = pattern.size() * 2;
    std::atomic<size_t> next{0};
    TimeTeam(team, [&](int) {
      for (size_t at; (at = next.fetch_add(bytes)) < memory().size();) {
        std::memcpy(&memory()[at], pattern.data(), std::min(bytes, memory().size() - at));
      }
    });
  }

  double Time(attention::WorkerTeam& team, const kernels::AttentionVariant& variant) {
    auto cpu = attention::CpuAttention::Create({.geometry = model_.kv,
                                                .max_turns = num_layers_,
                                                .num_heads = model_.num_heads,
                                                .max_rows = batch_,
                                                .query_dtype = KvDtype::kBf16,
                                                .num_workers = team.num_workers(),
                                                .variant = &variant},
                                               *device_);
    CHECK(cpu.ok()) << cpu.status();
    std::mt19937 rng(2);
    std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(model_.kv.k_dim)));
    std::generate_n(reinterpret_cast<uint16_t*>((*cpu)->queries(0)),
                    batch_ * model_.num_heads * model_.kv.k_dim,
                    [&] { return FloatToBf16(normal(rng)); });
    attention::StepContext step;
    step.micro_batches = {&attention_, 1};
    step.blocks = &*blocks_;
    step.num_turns = num_layers_;
    step.epoch = 1;
    step.handoff = true;
    step.num_workers = team.num_workers();
    step.turns = turns_.get();
    step.flags = (*cpu)->flags();
    for (int layer = 0; layer < num_layers_; ++layer) {
      turns_[layer].swing.Reset(num_blocks_, 0);
      turns_[layer].host_claimed = 0;
      turns_[layer].cpu_reported = 0;
      step.flags[layer].query_ready = 1;
    }
    const double seconds = TimeTeam(team, [&](int worker) { (*cpu)->RunWorker(worker, step); });
    for (int layer = 0; layer < num_layers_; ++layer) {
      CHECK_EQ(step.flags[layer].cpu_done.load(), 1u) << "layer " << layer;
    }
    // The partials of the last layer; a wrong result would make the rate worthless.
    for (int i = 0; i < batch_ * model_.num_heads; ++i) CHECK(std::isfinite((*cpu)->lse()[i]));
    return seconds;
  }

 private:
  const Model& model_;
  const int batch_;
  const int64_t num_blocks_;  // Of a layer
  int num_layers_ = 0;
  std::unique_ptr<device::CpuDevice> device_;
  std::optional<kvcache::BlockTable> blocks_;
  attention::StepAttention attention_;
  std::unique_ptr<attention::TurnProgress[]> turns_;
};

nlohmann::json Measure(Step& step, attention::WorkerTeam& team, LinkLoad* link,
                       const kernels::AttentionVariant& variant, int pairs,
                       const Model* row_major) {
  std::vector<double> read_s, attend_s, row_major_s;
  double link_bytes = 0, link_s = 0;
  for (int pair = -1; pair < pairs; ++pair) {  // The first one warms up.
    double read = 0, attend = 0;
    for (const bool reads : {pair % 2 == 0, pair % 2 != 0}) {
      const double start_s = Now();
      if (link != nullptr) link->Start();
      (reads ? read : attend) = reads ? TimeRawRead(team, step.memory()) : step.Time(team, variant);
      if (link != nullptr) link_bytes += link->StopAndGetBytes();
      link_s += Now() - start_s;
    }
    const double rows = row_major != nullptr ? TimeRowMajor(team, step.memory(), *row_major) : 0.0;
    if (pair < 0) continue;
    row_major_s.push_back(rows);
    read_s.push_back(read);
    attend_s.push_back(attend);
  }
  const double gigabytes = static_cast<double>(step.memory().size()) / 1e9;
  std::vector<double> ratios;
  for (int i = 0; i < pairs; ++i) ratios.push_back(read_s[i] / attend_s[i]);
  nlohmann::json row = {{"isa", std::string(variant.name)},
                        {"threads", team.num_workers()},
                        {"gbps", gigabytes / Median(attend_s)},
                        {"dram_read_gbps", gigabytes / Median(read_s)},
                        {"of_read", Median(ratios)},
                        {"link_busy", link != nullptr}};
  if (row_major != nullptr) {
    std::vector<double> ratios_of_rows;
    for (int i = 0; i < pairs; ++i) ratios_of_rows.push_back(row_major_s[i] / attend_s[i]);
    row["row_major_gbps"] = gigabytes / Median(row_major_s);
    row["over_row_major"] = Median(ratios_of_rows);
  }
  if (link != nullptr) {
    row["link"] = std::string(link->kind());
    row["link_gbps"] = link_bytes / link_s / 1e9;
  }
  return row;
}

std::string DescribeCpu() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    absl::string_view text = line;
    if (!absl::ConsumePrefix(&text, "model name")) continue;
    return std::to_string(UsableCores()) + " cores of " +
           std::string(text.substr(text.find(':') + 2));
  }
  return std::to_string(UsableCores()) + " cores";
}

bool IsWanted(const std::vector<std::string>& names, std::string_view name) {
  return names.empty() || std::find(names.begin(), names.end(), name) != names.end();
}

void PrintRow(const nlohmann::json& row) {
  std::printf("%-17s %3d x %6ld tokens %2d threads %-10s %s %6.1f of %6.1f GB/s: %.2f\n",
              row["model"].get<std::string>().c_str(), row["batch"].get<int>(),
              row["context_tokens"].get<long>(), row["threads"].get<int>(),
              row["isa"].get<std::string>().c_str(),
              row["link_busy"].get<bool>() ? "link " : "alone", row["gbps"].get<double>(),
              row["dram_read_gbps"].get<double>(), row["of_read"].get<double>());
  if (row.contains("row_major_gbps")) {
    std::printf("  pages of rows %6.1f GB/s: the tile format is %.2f times as fast\n",
                row["row_major_gbps"].get<double>(), row["over_row_major"].get<double>());
  }
  std::fflush(stdout);
}

void RunStep(const Flags& flags, const Model& model, int64_t context, int batch,
             nlohmann::json& rows) {
  Step step(model, context, batch, flags.memory_mib << 20);
  step.Fill(*attention::WorkerTeam::Create(UsableCores()));
  std::unique_ptr<LinkLoad> link;
  if (flags.link) {
    link = std::make_unique<LinkLoad>(step.memory().data(),
                                      static_cast<int64_t>(step.memory().size()));
  }
  for (const int threads : flags.threads) {
    const int workers = threads > 0 ? threads : attention::DefaultWorkers(UsableCores());
    const auto team = attention::WorkerTeam::Create(workers);
    for (const kernels::AttentionVariant& variant : kernels::AttentionVariants()) {
      if (variant.isa > DetectedCpuIsa() || !IsWanted(flags.isas, variant.name)) continue;
      for (LinkLoad* load : {static_cast<LinkLoad*>(nullptr), link.get()}) {
        const bool row_major = flags.row_major && load == nullptr && HasRowMajor(model);
        nlohmann::json row =
            Measure(step, *team, load, variant, flags.pairs, row_major ? &model : nullptr);
        row["model"] = model.name;
        row["context_tokens"] = context;
        row["batch"] = batch;
        PrintRow(row);
        rows.push_back(std::move(row));
        if (link == nullptr) break;
      }
    }
  }
}

void Run(const Flags& flags, nlohmann::json& rows) {
  for (const Model& model : Models()) {
    if (!IsWanted(flags.models, model.name)) continue;
    for (const int64_t context : flags.contexts) {
      for (const int batch : flags.batches) RunStep(flags, model, context, batch, rows);
    }
  }
}

}  // namespace
}  // namespace writescope::bench

int main(int argc, char** argv) {
  using namespace writescope::bench;
  Flags flags;
  CLI::App app("Rates of CPU attention beside those of plain reading");
  app.add_option("--isa", flags.isas, "Variants to run; all that the processor offers by default");
  app.add_option("--model", flags.models, "Names of model shapes; all by default");
  app.add_option("--context", flags.contexts, "Tokens of a sequence");
  app.add_option("--batch", flags.batches, "Sequences of a layer");
  app.add_option("--threads", flags.threads, "Numbers of workers; 0 is what the worker starts");
  app.add_option("--memory-mib", flags.memory_mib, "KV in all; far more than the caches hold");
  app.add_option("--pairs", flags.pairs, "Times that each of the two is measured");
  app.add_flag("--link", flags.link, "Also while copies over the link go on");
  app.add_flag("--row-major", flags.row_major, "Also the kernel for pages of token rows");
  app.add_option("--json", flags.json, "Where to write the result file");
  CLI11_PARSE(app, argc, argv);

  nlohmann::json rows = nlohmann::json::array();
  Run(flags, rows);
  if (flags.json.empty()) return 0;
  double raw_alone = 0, raw_with_link = 0;
  for (const nlohmann::json& row : rows) {
    double& best = row["link_busy"].get<bool>() ? raw_with_link : raw_alone;
    best = std::max(best, row["dram_read_gbps"].get<double>());
  }
  const nlohmann::json file = {
      {"benchmark", "cpu_attention"},
      {"machine", DescribeCpu()},
      {"commit", kCommit},
      {"engine_hash", kEngineHash},
      {"command", absl::StrJoin(argv, argv + argc, " ")},
      {"ceilings", {{"raw_read_gbps", raw_alone}, {"raw_read_with_link_gbps", raw_with_link}}},
      {"rows", rows}};
  std::ofstream out(flags.json);
  out << file.dump(1) << "\n";
  return out ? 0 : 1;
}
