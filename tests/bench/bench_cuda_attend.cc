// Speed of attention on the GPU: decode as a fraction of the bandwidth of a device copy in the same
// run (bytes read and written), a streamed wave's time, and prefill in TFLOP/s.
//
//   bench_cuda_attend [--tiny]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "engine/base/bf16.h"
#include "engine/base/check.h"
#include "engine/base/units.h"
#include "engine/device/cuda/cuda_device.h"
#include "engine/ops/cuda/cuda_attend.h"
#include "engine/ops/ops.h"

namespace writescope::ops {
namespace {

using device::Buffer;
using device::CudaDevice;

struct Model {
  const char* name;
  KvGeometry kv;
  int num_heads;
};
const Model kQwen3 = {"qwen3", {.num_kv_heads = 4, .k_dim = 128, .v_dim = 128}, 32};
const Model kMixtral = {"mixtral", {.num_kv_heads = 8, .k_dim = 128, .v_dim = 128}, 32};
const Model kV2Lite = {
    "v2-lite", {.num_kv_heads = 1, .k_dim = 576, .v_dim = 512, .value_in_key = true}, 16};

class Bench {
 public:
  explicit Bench(bool tiny) : tiny_(tiny) {
    auto device = CudaDevice::Create({.budget_bytes = (tiny ? 4 : 24) * kGiB});
    CHECK(device.ok()) << device.status();
    device_ = *std::move(device);
    cudaEventCreate(&start_);
    cudaEventCreate(&end_);
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    noise_.resize(8 * kMiB / 2);
    for (uint16_t& value : noise_) value = FloatToBf16(normal(rng));
  }

  void CopyBandwidth() {
    const int64_t bytes = tiny_ ? 16 * kMiB : 4 * kGiB;
    const Buffer from = Allocate(bytes), to = Allocate(bytes);
    const double us =
        MedianUs([&](int) { device_->compute().Copy(to.data(), from.data(), bytes); });
    copy_bytes_per_us_ = 2.0 * static_cast<double>(bytes) / us;
    std::printf("device copy: %.0f GB/s, reads and writes\n", copy_bytes_per_us_ * 1e-3);
  }

  // Every sequence has one query row at its end and one run of blocks.
  void Decode(const Model& model, int batch, int64_t context, bool force_simt = false) {
    if (tiny_) context = std::min<int64_t>(context, 1000);
    Setup(model, batch, 1, force_simt);
    const int64_t blocks = CeilDiv(context, kBlockTokens);
    const Buffer keys = Noise(batch * blocks * model.kv.block_bytes());
    for (int s = 0; s < batch; ++s) {
      AddSpan(keys.data() + s * blocks * model.kv.block_bytes(), context, 0, s);
      rows_.push_back({s, 1, context - 1});
    }
    // Back to back, as layers of a step are: the host is ahead of the GPU.
    const double us = MedianUs([&](int) { Attend(model); }, /*calls=*/10);
    const double bytes = static_cast<double>(batch * context) *
                         static_cast<double>(model.kv.block_bytes()) / kBlockTokens;
    std::printf("decode  %-8s %4d x %7lld %s %9.1f us %7.0f GB/s  %.3f of copy  host %.1f us\n",
                model.name, batch, static_cast<long long>(context), force_simt ? "simt" : "    ",
                us, bytes / us * 1e-3, bytes / us / copy_bytes_per_us_, host_us_);
  }

  // A wave of 2 MiB; other waves between two reads of the same one, as it comes from the link.
  void Wave(const Model& model) {
    Setup(model, 1, 1, false);
    const int64_t blocks = 2 * kMiB / model.kv.block_bytes();
    const int64_t wave_bytes = blocks * model.kv.block_bytes();
    const int num_waves = tiny_ ? 2 : 128;
    const Buffer keys = Noise(num_waves * wave_bytes);
    AddSpan(keys.data(), blocks * kBlockTokens, 0, 0);
    rows_.push_back({0, 1, int64_t{1} << 20});
    const double us = MedianUs(
        [&](int i) {
          spans_[0].base = keys.data() + i % num_waves * wave_bytes;
          Attend(model);
        },
        /*calls=*/64);
    std::printf("wave    %-8s 2 MiB %24.1f us each, back to back; host %.1f us\n", model.name, us,
                host_us_);
  }

  void Prefill(const Model& model, int chunk, int64_t context) {
    if (tiny_) context = chunk = 200;
    Setup(model, 1, chunk, false);
    const int64_t blocks = CeilDiv(context, kBlockTokens);
    const Buffer keys = Noise(blocks * model.kv.block_bytes());
    AddSpan(keys.data(), context, 0, 0);
    rows_.push_back({0, chunk, context - chunk});
    const double us = MedianUs([&](int) { Attend(model); }, /*calls=*/3);
    const double seen = static_cast<double>(chunk) *
                        (static_cast<double>(context) - static_cast<double>(chunk - 1) / 2);
    const double flop = 2.0 * (model.kv.k_dim + model.kv.v_dim) * model.num_heads * seen;
    std::printf("prefill %-8s %5d of %6lld  %10.1f us  %6.1f TFLOP/s\n", model.name, chunk,
                static_cast<long long>(context), us, flop / us * 1e-6);
  }

 private:
  Buffer Allocate(int64_t bytes) {
    auto buffer = device_->AllocateDevice(bytes, "bench");
    CHECK(buffer.ok()) << buffer.status();
    return *std::move(buffer);
  }

  Buffer Noise(int64_t bytes) {
    Buffer buffer = Allocate(bytes);
    const int64_t noise_bytes = static_cast<int64_t>(noise_.size()) * 2;
    for (int64_t at = 0; at < bytes; at += noise_bytes) {
      CHECK(cudaMemcpy(buffer.data() + at, noise_.data(),
                       static_cast<size_t>(std::min(noise_bytes, bytes - at)),
                       cudaMemcpyDefault) == cudaSuccess);
    }
    return buffer;
  }

  void Setup(const Model& model, int batch, int rows_each, bool force_simt) {
    const int64_t states = int64_t{batch} * rows_each * model.num_heads;
    const int dim = std::max(model.kv.k_dim, model.kv.v_dim);
    auto attend = CudaAttend::Create(*device_, {.num_heads = model.num_heads, .max_head_dim = dim},
                                     ComputeType::kBf16, force_simt);
    CHECK(attend.ok()) << attend.status();
    attend_ = *std::move(attend);
    spans_.clear();
    readers_.clear();
    rows_.clear();
    q_ = Allocate(states * model.kv.k_dim * 4);
    std::vector<float> q(static_cast<size_t>(states * model.kv.k_dim));
    std::mt19937 rng(2);
    for (float& value : q) value = static_cast<float>(rng() % 1000) * 4e-4f - 0.2f;
    cudaMemcpy(q_.data(), q.data(), q.size() * 4, cudaMemcpyDefault);
    o_ = Allocate(states * model.kv.v_dim * 4);
    m_ = Allocate(states * 4);
    l_ = Allocate(states * 4);
    attend_->Reset(batch * rows_each, model.num_heads, State());
  }

  AttendState State() {
    return {reinterpret_cast<float*>(o_.data()), reinterpret_cast<float*>(m_.data()),
            reinterpret_cast<float*>(l_.data())};
  }

  void AddSpan(const std::byte* base, int64_t num_tokens, int64_t first_position, int reader) {
    spans_.push_back({.base = base,
                      .num_blocks = static_cast<int>(CeilDiv(num_tokens, kBlockTokens)),
                      .num_tokens = num_tokens,
                      .first_position = first_position,
                      .first_reader = static_cast<int>(readers_.size()),
                      .num_readers = 1});
    readers_.push_back(reader);
  }

  void Attend(const Model& model) {
    attend_->Attend({.kv = model.kv,
                     .num_heads = model.num_heads,
                     .q = reinterpret_cast<const float*>(q_.data()),
                     .spans = spans_,
                     .readers = readers_,
                     .rows = rows_,
                     .state = State()});
  }

  // Of one call, over `repeats` measurements of `calls` back to back; also the host's time of a
  // call.
  double MedianUs(const std::function<void(int)>& call, int calls = 1) {
    const int repeats = tiny_ ? 2 : 15;
    device::CudaQueue& queue = device_->compute();
    std::vector<double> us, host_us;
    for (int r = 0; r < repeats + 2; ++r) {
      cudaEventRecord(start_, queue.stream());
      const auto host_start = std::chrono::steady_clock::now();
      for (int i = 0; i < calls; ++i) call(r * calls + i);
      const std::chrono::duration<double, std::micro> host =
          std::chrono::steady_clock::now() - host_start;
      cudaEventRecord(end_, queue.stream());
      CHECK(cudaEventSynchronize(end_) == cudaSuccess);
      float ms = 0;
      cudaEventElapsedTime(&ms, start_, end_);
      if (r < 2) continue;  // Warm-up
      us.push_back(ms * 1e3 / calls);
      host_us.push_back(host.count() / calls);
    }
    const absl::Status status = queue.TakeError();
    CHECK(status.ok()) << status;
    std::sort(us.begin(), us.end());
    std::sort(host_us.begin(), host_us.end());
    host_us_ = host_us[host_us.size() / 2];
    return us[us.size() / 2];
  }

  const bool tiny_;
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<CudaAttend> attend_;
  std::vector<uint16_t> noise_;
  Buffer q_, o_, m_, l_;
  std::vector<AttendSpan> spans_;
  std::vector<int> readers_;
  std::vector<ReaderRows> rows_;
  cudaEvent_t start_, end_;
  double copy_bytes_per_us_ = 1;
  double host_us_ = 0;
};

int Main(bool tiny) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::printf("no GPU\n");
    return tiny ? 0 : 1;
  }
  Bench bench(tiny);
  bench.CopyBandwidth();
  for (const Model& model : {kQwen3, kMixtral, kV2Lite}) {
    bench.Decode(model, 1, 131072);
    bench.Decode(model, 1, 32768);
    bench.Decode(model, 16, 8192);
    bench.Decode(model, 20, 8000);
    bench.Decode(model, 128, 1024);
    bench.Decode(model, 8, 131072);
    bench.Wave(model);
  }
  bench.Decode(kQwen3, 16, 8192, /*force_simt=*/true);
  for (const Model& model : {kQwen3, kMixtral, kV2Lite}) {
    bench.Prefill(model, 2048, 2048);
    bench.Prefill(model, 2048, 8192);
    bench.Prefill(model, 2048, 32768);
  }
  return 0;
}

}  // namespace
}  // namespace writescope::ops

int main(int argc, char** argv) {
  return writescope::ops::Main(argc > 1 && std::strcmp(argv[1], "--tiny") == 0);
}
