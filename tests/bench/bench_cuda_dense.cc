// How fast the GPU's part of a layer without attention is: experts of published models, their
// single kernels, matrix products of few rows, and the whole of a layer of Qwen3-30B-A3B.
//
// Each figure is the median of replays of a CUDA graph, so that launches by the host do not count;
// weights rotate among layers, so that none is in the cache. Shares are of a device-to-device copy
// (bytes read and written) in the same run. `--tiny` checks that it runs; it judges no speed.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "engine/base/check.h"
#include "engine/base/units.h"
#include "engine/kernels/cuda/expert_gemm.h"
#include "engine/ops/cuda/cuda_ops.h"

namespace writescope::ops {
namespace {

constexpr int kNoGpu = 77;  // What CTest takes for a skip.

struct Shape {
  const char* name;
  int hidden, num_experts, k, width, shared_width;
  WeightFormat format;
  int num_layers;  // Enough for their chosen experts not to fit into the cache
};

class Bench {
 public:
  Bench(device::CudaDevice& device, bool tiny) : device_(device), tiny_(tiny) {
    const int64_t size_bytes = tiny ? kMiB : kGiB;
    std::byte* a = Allocate(size_bytes);
    std::byte* b = Allocate(size_bytes);
    // Not in a graph: there the driver copies by an engine that is slower than a kernel.
    std::vector<float> ms(9);
    cudaEvent_t begin, end;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    for (float& value : ms) {
      cudaEventRecord(begin, stream());
      device_.compute().Copy(b, a, size_bytes);
      cudaEventRecord(end, stream());
      CHECK(cudaEventSynchronize(end) == cudaSuccess);
      cudaEventElapsedTime(&value, begin, end);
    }
    std::sort(ms.begin(), ms.end());
    copy_bytes_per_us_ = 2.0 * static_cast<double>(size_bytes) / (1e3 * ms[ms.size() / 2]);
    std::printf("copy inside the device: %.2f TB/s, reads and writes\n", copy_bytes_per_us_ / 1e6);
    buffers_.clear();
  }

  void Experts(const Shape& shape, const std::vector<int>& batches);
  void Products();
  void QwenLayer();

 private:
  cudaStream_t stream() { return device_.compute().stream(); }
  std::byte* Allocate(int64_t size_bytes) {
    auto buffer = device_.AllocateDevice(size_bytes, "bench");
    CHECK(buffer.ok()) << buffer.status();
    buffers_.push_back(*std::move(buffer));
    return buffers_.back().data();
  }
  void MakeOps(const OpsLimits& limits) {
    ops_.reset();
    buffers_.clear();
    auto ops = CreateCudaOps(device_, limits, {});
    CHECK(ops.ok()) << ops.status();
    ops_ = *std::move(ops);
  }
  int64_t MatrixBytes(WeightFormat format, int64_t rows, int64_t cols) {
    return ops_->footprint().matrix_bytes(WeightType::kBf16, format, rows, cols);
  }
  Matrix Random(std::byte* to, WeightFormat format, int64_t rows, int64_t cols, float sigma) {
    auto matrix = ops_->RandomMatrix(to, WeightType::kBf16, format, rows, cols, sigma, ++seed_);
    CHECK(matrix.ok()) << matrix.status();
    return *matrix;
  }
  Matrix Random(int64_t rows, int64_t cols, float sigma) {
    return Random(Allocate(MatrixBytes(WeightFormat::kSource, rows, cols)), WeightFormat::kSource,
                  rows, cols, sigma);
  }
  void* Activations(int64_t rows, int64_t cols) {
    return const_cast<std::byte*>(Random(rows, cols, 1).data);
  }
  MlpWeights Mlp(std::byte* to, WeightFormat format, int hidden, int width) {
    const int64_t in = MatrixBytes(format, width, hidden);
    const float sigma = 0.02f;
    return {Random(to, format, width, hidden, sigma), Random(to + in, format, width, hidden, sigma),
            Random(to + 2 * in, format, hidden, width, sigma)};
  }
  int64_t MlpBytes(WeightFormat format, int hidden, int width) {
    return 2 * MatrixBytes(format, width, hidden) + MatrixBytes(format, hidden, width);
  }

  // work(i) submits the i-th of `per_graph` pieces; microseconds of one.
  double GraphUs(const std::function<void(int)>& work, int per_graph = 1);
  double Share(double bytes, double us) const { return 100 * bytes / us / copy_bytes_per_us_; }

  struct Layer {
    Matrix router;
    std::vector<MlpWeights> experts;
    MlpWeights shared;
  };
  Layer MakeLayer(const Shape& shape);
  MoeArgs Moe(const Shape& shape, const Layer& layer, int tokens, const void* x, void* out);
  void SingleKernels(const Shape& shape, const std::vector<Layer>& layers, int tokens,
                     const std::vector<int32_t>& chosen, const void* x);

  device::CudaDevice& device_;
  const bool tiny_;
  std::unique_ptr<Ops> ops_;
  std::vector<device::Buffer> buffers_;
  double copy_bytes_per_us_ = 1;
  uint64_t seed_ = 0;
};

double Bench::GraphUs(const std::function<void(int)>& work, int per_graph) {
  for (int i = 0; i < per_graph; ++i) work(i);
  CHECK(cudaStreamSynchronize(stream()) == cudaSuccess);
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  for (int i = 0; i < per_graph; ++i) work(i);
  CHECK(cudaStreamEndCapture(stream(), &graph) == cudaSuccess);
  CHECK(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  const int replays = tiny_ ? 2 : 12;
  std::vector<float> ms;
  for (int i = 0; i < replays; ++i) {
    cudaEventRecord(begin, stream());
    cudaGraphLaunch(executable, stream());
    cudaEventRecord(end, stream());
    CHECK(cudaEventSynchronize(end) == cudaSuccess);
    cudaEventElapsedTime(&ms.emplace_back(), begin, end);
  }
  const absl::Status error = device_.compute().TakeError();
  CHECK(error.ok()) << error;
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(ms.begin(), ms.end());
  return 1e3 * ms[ms.size() / 2] / per_graph;
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
  std::printf("\n%s, %s: hidden %d, %d experts, top %d, width %d, shared %d\n", shape.name,
              shape.format == WeightFormat::kInt4 ? "int4" : "bf16", shape.hidden,
              shape.num_experts, shape.k, shape.width, shape.shared_width);
  for (const int tokens : batches) {
    std::vector<int32_t> chosen(static_cast<size_t>(tokens) * shape.k);
    MoeArgs first = Moe(shape, layers[0], tokens, x, out);
    first.choice.record = chosen.data();
    ops_->Moe(first);
    CHECK(cudaStreamSynchronize(stream()) == cudaSuccess);
    const double us =
        GraphUs([&](int i) { ops_->Moe(Moe(shape, layers[i], tokens, x, out)); }, shape.num_layers);
    const double distinct =
        static_cast<double>(std::set<int32_t>(chosen.begin(), chosen.end()).size());
    double bytes = distinct * MlpBytes(shape.format, shape.hidden, shape.width);
    double flops = 6.0 * shape.hidden * shape.width * tokens * shape.k;
    if (shape.shared_width > 0) {
      bytes += MlpBytes(WeightFormat::kSource, shape.hidden, shape.shared_width);
      flops += 6.0 * shape.hidden * shape.shared_width * tokens;
    }
    std::printf("tokens %4d: %3.0f experts, whole %8.1f us, %5.1f %% of copy, %6.1f TFLOP/s\n",
                tokens, distinct, us, Share(bytes, us), flops / us / 1e6);
    SingleKernels(shape, layers, tokens, chosen, x);
  }
}

// The launches of which a Moe call consists, and the experts by each kernel.
void Bench::SingleKernels(const Shape& shape, const std::vector<Layer>& layers, int tokens,
                          const std::vector<int32_t>& chosen, const void* x) {
  const int pairs = tokens * shape.k;
  const size_t kept = buffers_.size();
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
  std::printf("             route %.1f, sum %.1f us;", route_us, combine_us);
  const double distinct =
      static_cast<double>(std::set<int32_t>(chosen.begin(), chosen.end()).size());
  for (const int slots : {kernels::kStreamSlotsFew, kernels::kStreamSlots, kernels::kTileSlotsFew,
                          kernels::kTileSlots}) {
    // Not where a kernel is out of the question.
    if (slots < kernels::kTileSlotsFew && pairs > 32 * shape.num_experts) continue;
    if (slots == kernels::kTileSlots && pairs < shape.num_experts) continue;
    const int num_tiles =
        static_cast<int>(kernels::MaxExpertTiles(pairs, shape.num_experts, slots));
    const double sort_us = GraphUs(
        [&](int) {
          kernels::LaunchSortPairs(stream(), shape.num_experts, pairs, slots, experts, slot_pairs,
                                   tiles);
        },
        kPerGraph);
    const auto run = [&](const kernels::ExpertGemmArgs& args) {
      slots >= kernels::kTileSlotsFew ? kernels::LaunchExpertGemmTile(stream(), slots, args)
                                      : kernels::LaunchExpertGemmStream(stream(), slots, args);
    };
    const auto args_of = [&](const Layer& layer) {
      return kernels::ExpertGemmArgs{
          .weights = shape.format == WeightFormat::kInt4 ? kernels::ExpertWeights::kInt4
                                                         : kernels::ExpertWeights::kBf16,
          .rows = shape.width,
          .cols = shape.hidden,
          .w = layer.experts[0].gate.data,
          .up = layer.experts[0].up.data,
          .expert_stride_bytes = layer.experts[1].gate.data - layer.experts[0].gate.data,
          .tiles = tiles,
          .num_tiles = num_tiles,
          .slot_pairs = slot_pairs,
          .x = x,
          .x_stride = shape.hidden,
          .x_by_token = true,
          .experts_per_token = shape.k,
          .y = activated,
          .y_stride = shape.width};
    };
    const double in_us =
        GraphUs([&](int i) { run(args_of(layers[i])); }, static_cast<int>(layers.size()));
    const double out_us = GraphUs(
        [&](int i) {
          kernels::ExpertGemmArgs args = args_of(layers[i]);
          args.w = layers[i].experts[0].down.data;
          args.up = nullptr;
          std::swap(args.rows, args.cols);
          args.x = activated;
          args.x_stride = shape.width;
          args.x_by_token = false;
          args.y = results;
          args.y_stride = shape.hidden;
          args.y_by_pair = true;
          run(args);
        },
        static_cast<int>(layers.size()));
    const double in_bytes = 2 * distinct * MatrixBytes(shape.format, shape.width, shape.hidden);
    const double out_bytes = distinct * MatrixBytes(shape.format, shape.hidden, shape.width);
    const double flops = 2.0 * shape.hidden * shape.width * pairs;
    std::printf(" [%d: sort %.1f, in %.1f us %.0f %% %.0f TF, out %.1f us %.0f %% %.0f TF]", slots,
                sort_us, in_us, Share(in_bytes, in_us), 2 * flops / in_us / 1e6, out_us,
                Share(out_bytes, out_us), flops / out_us / 1e6);
  }
  std::printf("\n");
  buffers_.resize(kept);
}

void Bench::Products() {
  MakeOps({.max_tokens = 2048,
           .hidden = 4096,
           .max_mlp_width = 16,
           .num_experts = 0,
           .experts_per_token = 0,
           .num_heads = 32,
           .max_head_dim = 128});
  std::printf("\nmatrix products, bf16: us and %% of copy by rows of x\n");
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
    std::printf("%6ld x %4ld:", rows, cols);
    for (const int n : {1, 2, 4, 8, 16, 32, 128, 2048}) {
      if (n * rows > 200'000'00 || (tiny_ && n > 2)) continue;
      const void* x = Activations(n, cols);
      void* out = Activations(n, rows);
      const double us = GraphUs([&](int i) { ops_->Linear(n, x, weights[i], out, false); }, copies);
      std::printf("  %d: %.1f (%.0f %%, %.0f TF)", n, us, Share(2.0 * rows * cols, us),
                  2.0 * n * rows * cols / us / 1e6);
    }
    std::printf("\n");
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
  const absl::Status warm = ops_->WarmUp({.num_kv_heads = 4, .k_dim = 128, .v_dim = 128}, 32);
  CHECK(warm.ok()) << warm;
  cudaMemGetInfo(&free_after, &total);
  std::printf("\nwarm-up: %.2f s, %.1f MiB of code\n", device::NowSeconds() - warm_s,
              static_cast<double>(free_before - free_after) / kMiB);
  const std::vector<float> ones(2048, 1.0f);
  const float* norm = *ops_->LoadVector(Allocate(Ops::vector_bytes(2048)), 2048, ones.data());
  void* x = Activations(128, 2048);
  void* normed = Activations(128, 2048);
  auto* qkv = static_cast<std::byte*>(Activations(128, 5120));
  auto* q_out = reinterpret_cast<float*>(Allocate(128 * 4096 * 4));
  const KvGeometry kv = {.num_kv_heads = 4, .k_dim = 128, .v_dim = 128};
  std::byte* blocks = Allocate(128 * kv.block_bytes());
  std::printf("\nQwen3-30B-A3B, int4: a layer without attention\n");
  for (const int tokens : {1, 16, 128}) {
    std::vector<int64_t> positions(tokens, 8191);
    std::vector<KvTarget> targets;
    for (int t = 0; t < tokens; ++t) targets.push_back({blocks + t * kv.block_bytes(), 63});
    const auto before = [&](int i) {
      ops_->Linear(tokens, normed, attention[i].qkv, qkv);
      ops_->GqaPrepare({.num_tokens = tokens,
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
      ops_->Linear(tokens, qkv, attention[i].o, x, true);
      ops_->RmsNorm(tokens, 2048, x, norm, 1e-6f, normed);
      MoeArgs moe = Moe(shape, layers[i], tokens, normed, x);
      moe.norm = norm;
      moe.norm_eps = 1e-6f;
      moe.normed = normed;
      ops_->Moe(moe);
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
    std::printf(
        "tokens %3d: before attention %.1f us, after %.1f us; without a graph %.1f us, of "
        "which submitting %.1f us\n",
        tokens, before_us, after_us, (done_s - start_s) / 60 * 1e6,
        (submitted_s - start_s) / 60 * 1e6);
  }
}

int Main(bool tiny) {
  auto device = device::CudaDevice::Create({.budget_bytes = (tiny ? 4 : 24) * kGiB});
  if (!device.ok()) {
    std::printf("no GPU: %s\n", device.status().ToString().c_str());
    return kNoGpu;
  }
  Bench bench(**device, tiny);
  if (tiny) {
    bench.Experts({"tiny", 256, 8, 2, 128, 64, WeightFormat::kInt4, 2}, {1, 40});
    bench.Experts({"tiny", 256, 8, 2, 128, 64, WeightFormat::kSource, 2}, {1, 40});
    return 0;
  }
  const std::vector<int> batches = {1, 8, 32, 128, 2048};
  bench.Experts({"Qwen3-30B-A3B", 2048, 128, 8, 768, 0, WeightFormat::kInt4, 6}, batches);
  bench.Experts({"Mixtral-8x7B", 4096, 8, 2, 14336, 0, WeightFormat::kInt4, 3}, batches);
  bench.Experts({"Mixtral-8x7B", 4096, 8, 2, 14336, 0, WeightFormat::kSource, 2}, batches);
  bench.Experts({"DeepSeek-V2-Lite", 2048, 64, 6, 1408, 2816, WeightFormat::kSource, 3}, batches);
  bench.Products();
  bench.QwenLayer();
  return 0;
}

}  // namespace
}  // namespace writescope::ops

int main(int argc, char** argv) {
  return writescope::ops::Main(argc > 1 && std::strcmp(argv[1], "--tiny") == 0);
}
