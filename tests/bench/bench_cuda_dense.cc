// How fast the GPU's part of a layer without attention is: experts of published models, their
// single kernels, matrix products of few rows, and the whole of a layer of Qwen3-30B-A3B.
//
// Each figure is the median of replays of a CUDA graph, so that launches by the host do not count;
// weights rotate among layers, so that none is in the cache. Shares are of a plain read of device
// memory, and of a large product by cuBLAS, in the same run. `--tiny` checks that it runs; it
// judges no speed.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/check.h"
#include "engine/base/units.h"
#include "engine/kernels/cuda/expert_gemm.h"
#include "engine/ops/cuda/cuda_ops.h"
#include "tests/bench/dense_report.h"
#include "tests/bench/device_bench.h"

namespace writescope::ops {
namespace {

using bench::DenseReport;
using bench::DenseRow;

constexpr int kNoGpu = 77;  // What CTest takes for a skip.

struct Shape {
  const char* name;
  int hidden, num_experts, k, width, shared_width;
  WeightFormat format;
  int num_layers;  // Enough for their chosen experts not to fit into the cache
};

class Bench : bench::DeviceBench {
 public:
  Bench(device::CudaDevice& device, DenseReport& report, bool tiny)
      : DeviceBench(device, tiny ? 2 : 12), report_(report), tiny_(tiny) {}

  void Ceilings() { report_.SetCeilings(MeasureCeilings(tiny_)); }
  void Experts(const Shape& shape, const std::vector<int>& batches);
  void Products();
  void QwenLayer();

 private:
  struct Layer {
    Matrix router;
    std::vector<MlpWeights> experts;
    MlpWeights shared;
  };
  Layer MakeLayer(const Shape& shape);
  MoeArgs Moe(const Shape& shape, const Layer& layer, int tokens, const void* x, void* out);
  void SingleKernels(const Shape& shape, const std::vector<Layer>& layers, int tokens,
                     const std::vector<int32_t>& chosen, const void* x);

  DenseReport& report_;
  const bool tiny_;
};

int Distinct(const std::vector<int32_t>& experts) {
  return static_cast<int>(std::set<int32_t>(experts.begin(), experts.end()).size());
}

DenseRow RowOf(const Shape& shape, const std::string& kernel, int tokens, int experts, double us,
               double bytes, double flops) {
  return {.kernel = kernel,
          .shape = shape.name,
          .weights = shape.format == WeightFormat::kInt4 ? "int4" : "bf16",
          .tokens = tokens,
          .experts = experts,
          .us = us,
          .bytes = bytes,
          .flops = flops};
}

Bench::Layer Bench::MakeLayer(const Shape& shape) {
  Layer layer;
  // Wide logits, so that tokens differ in their experts.
  layer.router = Random(shape.num_experts, shape.hidden, 0.05f);
  const int64_t expert_bytes = MlpBytes(shape.format, shape.hidden, shape.width);
  std::byte* to = Allocate(expert_bytes * shape.num_experts);
  for (int e = 0; e < shape.num_experts; ++e) {
    layer.experts.push_back(Mlp(to + e * expert_bytes, shape.format, shape.hidden, shape.width));
  }
  if (shape.shared_width > 0) {
    layer.shared = Mlp(Allocate(MlpBytes(WeightFormat::kSource, shape.hidden, shape.shared_width)),
                       WeightFormat::kSource, shape.hidden, shape.shared_width);
  }
  return layer;
}

MoeArgs Bench::Moe(const Shape& shape, const Layer& layer, int tokens, const void* x, void* out) {
  return {.num_tokens = tokens,
          .hidden = shape.hidden,
          .x = x,
          .out = out,
          .router = layer.router,
          .experts = layer.experts,
          .shared = shape.shared_width > 0 ? &layer.shared : nullptr,
          .experts_per_token = shape.k,
          .renormalize = true};
}

void Bench::Experts(const Shape& shape, const std::vector<int>& batches) {
  const int max_tokens = *std::max_element(batches.begin(), batches.end());
  MakeOps({.max_tokens = max_tokens,
           .hidden = shape.hidden,
           .max_mlp_width = std::max(shape.width, shape.shared_width),
           .max_expert_width = shape.width,
           .num_experts = shape.num_experts,
           .experts_per_token = shape.k,
           .num_heads = 32,
           .max_head_dim = 128});
  std::vector<Layer> layers;
  for (int i = 0; i < shape.num_layers; ++i) layers.push_back(MakeLayer(shape));
  const void* x = Activations(max_tokens, shape.hidden);
  void* out = Activations(max_tokens, shape.hidden);
  for (const int tokens : batches) {
    std::vector<int32_t> chosen(static_cast<size_t>(tokens) * shape.k);
    MoeArgs first = Moe(shape, layers[0], tokens, x, out);
    first.choice.record = chosen.data();
    ops().Moe(first);
    CHECK(cudaStreamSynchronize(stream()) == cudaSuccess);
    const double us =
        GraphUs([&](int i) { ops().Moe(Moe(shape, layers[i], tokens, x, out)); }, shape.num_layers);
    const int distinct = Distinct(chosen);
    double bytes = 1.0 * distinct * MlpBytes(shape.format, shape.hidden, shape.width);
    double flops = 6.0 * shape.hidden * shape.width * tokens * shape.k;
    if (shape.shared_width > 0) {
      bytes += MlpBytes(WeightFormat::kSource, shape.hidden, shape.shared_width);
      flops += 6.0 * shape.hidden * shape.shared_width * tokens;
    }
    report_.Add(RowOf(shape, "experts, whole", tokens, distinct, us, bytes, flops));
    SingleKernels(shape, layers, tokens, chosen, x);
  }
}

struct NamedPlan {
  const char* name;
  kernels::ExpertPlan plan;
};
constexpr NamedPlan kPlans[] = {
    {"stream", {kernels::ExpertKernel::kStream, kernels::kStreamSlotsFew}},
    {"stream", {kernels::ExpertKernel::kStream, kernels::kStreamSlots}},
    {"ring", {kernels::ExpertKernel::kRing, kernels::kRingSlotsFew}},
    {"ring", {kernels::ExpertKernel::kRing, kernels::kRingSlots}},
    {"tile", {kernels::ExpertKernel::kTile, kernels::kTileSlotsFew}},
    {"tile", {kernels::ExpertKernel::kTile, kernels::kTileSlots}},
    {"wide", {kernels::ExpertKernel::kWide, kernels::kWideSlots}}};

// The launches of which a Moe call consists, and the experts by each kernel.
void Bench::SingleKernels(const Shape& shape, const std::vector<Layer>& layers, int tokens,
                          const std::vector<int32_t>& chosen, const void* x) {
  const int pairs = tokens * shape.k;
  const size_t kept = num_buffers();
  auto* experts = reinterpret_cast<int32_t*>(Allocate(pairs * 4));
  auto* slot_pairs = reinterpret_cast<int32_t*>(Allocate(pairs * 4));
  auto* weights = reinterpret_cast<float*>(Allocate(pairs * 4));
  auto* logits = reinterpret_cast<float*>(Allocate(int64_t{tokens} * shape.num_experts * 4));
  auto* tiles = reinterpret_cast<kernels::ExpertTile*>(
      Allocate(kernels::MaxExpertTiles(pairs, shape.num_experts, kernels::kStreamSlotsFew) * 16));
  std::byte* activated = Allocate(int64_t{pairs} * shape.width * 2);
  std::byte* results = Allocate(int64_t{pairs} * shape.hidden * 2);
  cudaMemcpy(experts, chosen.data(), chosen.size() * 4, cudaMemcpyHostToDevice);
  const kernels::RouterConfig config = {
      .num_experts = shape.num_experts, .experts_per_token = shape.k, .renormalize = true};
  constexpr int kPerGraph = 8;
  const double route_us = GraphUs(
      [&](int) { kernels::LaunchRoute(stream(), config, tokens, logits, true, experts, weights); },
      kPerGraph);
  const double combine_us = GraphUs(
      [&](int) {
        kernels::LaunchCombine(stream(), {.num_tokens = tokens,
                                          .k = shape.k,
                                          .hidden = shape.hidden,
                                          .results = results,
                                          .weights = weights,
                                          .out = activated});
      },
      kPerGraph);
  const int distinct = Distinct(chosen);
  const auto add = [&](const std::string& kernel, double us, double bytes, double flops) {
    report_.Add(RowOf(shape, kernel, tokens, distinct, us, bytes, flops));
  };
  add("route", route_us, 0, 0);
  add("sum", combine_us, 0, 0);
  std::set<int> timed_slots;
  for (const NamedPlan& named : kPlans) {
    const int slots = named.plan.tile_slots;
    const auto weights = shape.format == WeightFormat::kInt4 ? kernels::ExpertWeights::kInt4
                                                             : kernels::ExpertWeights::kBf16;
    const kernels::ExpertMatrix in = {
        .weights = weights, .rows = shape.width, .cols = shape.hidden, .gated = true};
    const kernels::ExpertMatrix out = {
        .weights = weights, .rows = shape.hidden, .cols = shape.width};
    if (!kernels::CanRun(named.plan.kernel, in) || !kernels::CanRun(named.plan.kernel, out)) {
      continue;
    }
    // Nor where a kernel is out of the question.
    if (slots <= kernels::kStreamSlots && pairs > 32 * shape.num_experts) continue;
    if (slots > kernels::kTileSlotsFew && pairs < shape.num_experts) continue;
    const int num_tiles =
        static_cast<int>(kernels::MaxExpertTiles(pairs, shape.num_experts, slots));
    const auto sort = [&](int) {
      kernels::LaunchSortPairs(stream(), shape.num_experts, pairs, slots, experts, slot_pairs,
                               tiles);
    };
    const auto args_of = [&](const Layer& layer) {
      return kernels::ExpertGemmArgs{
          .weights = weights,
          .rows = shape.width,
          .cols = shape.hidden,
          .w = layer.experts[0].gate.data,
          .up = layer.experts[0].up.data,
          .expert_stride_bytes = layer.experts[1].gate.data - layer.experts[0].gate.data,
          .tiles = tiles,
          .num_tiles = num_tiles,
          .slot_pairs = slot_pairs,
          // The wide kernel's values are random, too: in what order they lie does not matter.
          .x_dealt = named.plan.kernel == kernels::ExpertKernel::kWide,
          .x = x,
          .x_stride = shape.hidden,
          .x_by_token = true,
          .experts_per_token = shape.k,
          .y = activated,
          .y_stride = shape.width};
    };
    const auto down_of = [&](const Layer& layer) {
      kernels::ExpertGemmArgs args = args_of(layer);
      args.w = layer.experts[0].down.data;
      args.up = nullptr;
      std::swap(args.rows, args.cols);
      args.x = activated;
      args.x_stride = shape.width;
      args.x_by_token = false;
      args.y = results;
      args.y_stride = shape.hidden;
      args.y_by_pair = true;
      return args;
    };
    const auto run_us = [&](const auto& args) {
      return GraphUs(
          [&](int i) {
            CHECK(kernels::LaunchExpertGemm(stream(), kernels::ValueType::kBf16, named.plan,
                                            args(layers[i])) == cudaSuccess);
          },
          static_cast<int>(layers.size()));
    };
    const double bytes = 1.0 * distinct * MatrixBytes(shape.format, shape.width, shape.hidden);
    const double flops = 2.0 * shape.hidden * shape.width * pairs;
    const std::string name = absl::StrCat(named.name, " ", slots);
    if (timed_slots.insert(slots).second) {
      add(absl::StrCat("order, tiles of ", slots), GraphUs(sort, kPerGraph), 0, 0);
    }
    sort(0);
    add(absl::StrCat("gate and up, ", name), run_us(args_of), 2 * bytes, 2 * flops);
    add(absl::StrCat("down, ", name), run_us(down_of), bytes, flops);
    if (slots > kernels::kStreamSlots || pairs > 8 * shape.num_experts) continue;
    // As a Moe call has them, where what ends one hides some of what begins the other.
    const double both_us = GraphUs(
        [&](int i) {
          kernels::ExpertGemmArgs down = down_of(layers[i]);
          down.tiles_settled = true;
          CHECK(kernels::LaunchExpertGemm(stream(), kernels::ValueType::kBf16, named.plan,
                                          args_of(layers[i])) == cudaSuccess &&
                kernels::LaunchExpertGemm(stream(), kernels::ValueType::kBf16, named.plan, down) ==
                    cudaSuccess);
        },
        static_cast<int>(layers.size()));
    add(absl::StrCat("both, ", name), both_us, 3 * bytes, 3 * flops);
  }
  FreeFrom(kept);
}

void Bench::Products() {
  MakeOps({.max_tokens = 2048,
           .hidden = 4096,
           .max_mlp_width = 16,
           .num_experts = 0,
           .experts_per_token = 0,
           .num_heads = 32,
           .max_head_dim = 128});
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{4096, 2048},
                                   {512, 2048},
                                   {2048, 4096},
                                   {128, 2048},
                                   {4096, 4096},
                                   {151936, 2048}}) {
    const int copies =
        static_cast<int>(std::clamp<int64_t>((tiny_ ? 1 : 128 * kMiB) / (rows * cols * 2), 1, 64));
    std::vector<Matrix> weights;
    for (int i = 0; i < copies; ++i) weights.push_back(Random(rows, cols, 0.02f));
    for (const int n : {1, 2, 4, 8, 16, 32, 128, 2048}) {
      if (n * rows > 200'000'00 || (tiny_ && n > 2)) continue;
      const void* x = Activations(n, cols);
      void* out = Activations(n, rows);
      const double us = GraphUs([&](int i) { ops().Linear(n, x, weights[i], out, false); }, copies);
      const double values = static_cast<double>(rows * cols);
      report_.Add({.kernel = "product",
                   .shape = absl::StrCat(rows, " x ", cols),
                   .weights = "bf16",
                   .tokens = n,
                   .us = us,
                   .bytes = 2 * values,
                   .flops = 2 * n * values});
    }
  }
}

void Bench::QwenLayer() {
  const Shape shape = {"Qwen3", 2048, 128, 8, 768, 0, WeightFormat::kInt4, tiny_ ? 1 : 6};
  MakeOps({.max_tokens = 128,
           .hidden = shape.hidden,
           .max_mlp_width = shape.width,
           .max_expert_width = shape.width,
           .num_experts = shape.num_experts,
           .experts_per_token = shape.k,
           .num_heads = 32,
           .max_head_dim = 128});
  struct Attention {
    Matrix qkv, o;
  };
  std::vector<Layer> layers;
  std::vector<Attention> attention;
  for (int i = 0; i < shape.num_layers; ++i) {
    layers.push_back(MakeLayer(shape));
    attention.push_back({Random(5120, 2048, 0.02f), Random(2048, 4096, 0.02f)});
  }
  // What the warm-up loads comes on top of what the device has counted.
  size_t free_before = 0, free_after = 0, total = 0;
  cudaMemGetInfo(&free_before, &total);
  const double warm_s = device::NowSeconds();
  const absl::Status warm = ops().WarmUp({.num_kv_heads = 4, .k_dim = 128, .v_dim = 128}, 32);
  CHECK(warm.ok()) << warm;
  cudaMemGetInfo(&free_after, &total);
  std::printf("warm-up: %.2f s, %.1f MiB of code\n", device::NowSeconds() - warm_s,
              static_cast<double>(free_before - free_after) / kMiB);
  const std::vector<float> ones(2048, 1.0f);
  const float* norm = *ops().LoadVector(Allocate(Ops::vector_bytes(2048)), 2048, ones.data());
  void* x = Activations(128, 2048);
  void* normed = Activations(128, 2048);
  auto* qkv = static_cast<std::byte*>(Activations(128, 5120));
  auto* q_out = reinterpret_cast<float*>(Allocate(128 * 4096 * 4));
  const KvGeometry kv = {.num_kv_heads = 4, .k_dim = 128, .v_dim = 128};
  std::byte* blocks = Allocate(128 * kv.block_bytes());
  for (const int tokens : {1, 16, 128}) {
    std::vector<int64_t> positions(tokens, 8191);
    std::vector<KvTarget> targets;
    for (int t = 0; t < tokens; ++t) targets.push_back({blocks + t * kv.block_bytes(), 63});
    const auto before = [&](int i) {
      ops().Linear(tokens, normed, attention[i].qkv, qkv);
      ops().GqaPrepare({.num_tokens = tokens,
                        .num_heads = 32,
                        .head_dim = 128,
                        .kv = kv,
                        .q = qkv,
                        .k = qkv + 4096 * 2,
                        .v = qkv + 4608 * 2,
                        .token_stride = 5120,
                        .q_norm = norm,
                        .k_norm = norm,
                        .norm_eps = 1e-6f,
                        .rope = {norm, 128, 1},
                        .scale_log2 = 0.1f,
                        .positions = positions,
                        .targets = targets,
                        .q_out = q_out});
    };
    const auto after = [&](int i) {
      ops().Linear(tokens, qkv, attention[i].o, x, true);
      ops().RmsNorm(tokens, 2048, x, norm, 1e-6f, normed);
      MoeArgs moe = Moe(shape, layers[i], tokens, normed, x);
      moe.norm = norm;
      moe.norm_eps = 1e-6f;
      moe.normed = normed;
      ops().Moe(moe);
    };
    const double before_us = GraphUs(before, shape.num_layers);
    const double after_us = GraphUs(after, shape.num_layers);
    const double start_s = device::NowSeconds();
    for (int i = 0; i < 60; ++i) {
      before(i % shape.num_layers);
      after(i % shape.num_layers);
    }
    const double submitted_s = device::NowSeconds();
    CHECK(cudaStreamSynchronize(stream()) == cudaSuccess);
    const double done_s = device::NowSeconds();
    const std::pair<const char*, double> parts[] = {
        {"layer, to attention", before_us},
        {"layer, from attention", after_us},
        {"layer, not in a graph", (done_s - start_s) / 60 * 1e6},
        {"layer, submitting", (submitted_s - start_s) / 60 * 1e6}};
    for (const auto& [name, us] : parts) report_.Add(RowOf(shape, name, tokens, 0, us, 0, 0));
  }
}

int Main(bool tiny, bool few, const std::string& json, const std::string& command) {
  auto device = device::CudaDevice::Create({.budget_bytes = (tiny ? 4 : 24) * kGiB});
  if (!device.ok()) {
    std::printf("no GPU: %s\n", device.status().ToString().c_str());
    return kNoGpu;
  }
  DenseReport report;
  Bench bench(**device, report, tiny);
  bench.Ceilings();
  if (tiny) {
    bench.Experts({"tiny", 256, 8, 2, 128, 64, WeightFormat::kInt4, 2}, {1, 40});
    bench.Experts({"tiny", 256, 8, 2, 128, 64, WeightFormat::kSource, 2}, {1, 40});
  } else if (few) {
    bench.Experts({"Qwen3-30B-A3B", 2048, 128, 8, 768, 0, WeightFormat::kInt4, 6}, {1, 8, 16});
    bench.QwenLayer();
  } else {
    const std::vector<int> batches = {1, 4, 8, 16, 32, 128, 256, 2048};
    bench.Experts({"Qwen3-30B-A3B", 2048, 128, 8, 768, 0, WeightFormat::kInt4, 6}, batches);
    bench.Experts({"Mixtral-8x7B", 4096, 8, 2, 14336, 0, WeightFormat::kInt4, 3}, batches);
    bench.Experts({"Mixtral-8x7B", 4096, 8, 2, 14336, 0, WeightFormat::kSource, 2}, batches);
    const Shape v2_lite = {"DeepSeek-V2-Lite", 2048, 64, 6, 1408, 2816, WeightFormat::kSource, 3};
    bench.Experts(v2_lite, batches);
    Shape v2_lite_int4 = v2_lite;
    v2_lite_int4.format = WeightFormat::kInt4;
    bench.Experts(v2_lite_int4, batches);
    bench.Products();
    bench.QwenLayer();
  }
  return json.empty() || report.Write(json, (*device)->info().name, command) ? 0 : 1;
}

}  // namespace
}  // namespace writescope::ops

int main(int argc, char** argv) {
  bool tiny = false, few = false;
  std::string json;
  CLI::App app("Times of the GPU's part of a layer without attention");
  app.add_flag("--tiny", tiny, "Small sizes, which check that it runs");
  app.add_flag("--few", few, "Only Qwen3-30B-A3B with 1, 8 and 16 tokens: to compare two versions");
  app.add_option("--json", json, "Where to write the result file");
  CLI11_PARSE(app, argc, argv);
  return writescope::ops::Main(tiny, few, json, absl::StrJoin(argv, argv + argc, " "));
}
