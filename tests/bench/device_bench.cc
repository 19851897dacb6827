#include "tests/bench/device_bench.h"

#include <algorithm>
#include <utility>

#include "engine/base/check.h"
#include "engine/base/units.h"
#include "engine/ops/cuda/cuda_ops.h"
#include "tests/bench/device_read.h"

namespace writescope::bench {
namespace {

using ops::Matrix;
using ops::WeightFormat;
using ops::WeightType;

double MedianUs(std::vector<float> ms) {
  std::sort(ms.begin(), ms.end());
  return 1e3 * ms[ms.size() / 2];
}

// The times of `count` runs of `submit`.
std::vector<float> TimesMs(cudaStream_t stream, int count, const std::function<void()>& submit) {
  std::vector<float> ms(count);
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  for (float& value : ms) {
    cudaEventRecord(begin, stream);
    submit();
    cudaEventRecord(end, stream);
    CHECK(cudaEventSynchronize(end) == cudaSuccess);
    cudaEventElapsedTime(&value, begin, end);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return ms;
}

}  // namespace

void DeviceBench::MakeOps(const ops::OpsLimits& limits) {
  ops_.reset();
  buffers_.clear();
  auto made = ops::CreateCudaOps(device_, limits, {});
  CHECK(made.ok()) << made.status();
  ops_ = *std::move(made);
}

std::byte* DeviceBench::Allocate(int64_t size_bytes) {
  auto buffer = device_.AllocateDevice(size_bytes, "bench");
  CHECK(buffer.ok()) << buffer.status();
  buffers_.push_back(*std::move(buffer));
  return buffers_.back().data();
}

int64_t DeviceBench::MatrixBytes(WeightFormat format, int64_t rows, int64_t cols) const {
  return ops_->footprint().matrix_bytes(WeightType::kBf16, format, rows, cols);
}

Matrix DeviceBench::Random(std::byte* to, WeightFormat format, int64_t rows, int64_t cols,
                           float sigma) {
  auto matrix = ops_->RandomMatrix(to, WeightType::kBf16, format, rows, cols, sigma, ++seed_);
  CHECK(matrix.ok()) << matrix.status();
  return *matrix;
}

Matrix DeviceBench::Random(int64_t rows, int64_t cols, float sigma) {
  return Random(Allocate(MatrixBytes(WeightFormat::kSource, rows, cols)), WeightFormat::kSource,
                rows, cols, sigma);
}

void* DeviceBench::Activations(int64_t rows, int64_t cols) {
  return const_cast<std::byte*>(Random(rows, cols, 1).data);
}

ops::MlpWeights DeviceBench::Mlp(std::byte* to, WeightFormat format, int hidden, int width) {
  const int64_t in = MatrixBytes(format, width, hidden);
  const float sigma = 0.02f;
  return {Random(to, format, width, hidden, sigma), Random(to + in, format, width, hidden, sigma),
          Random(to + 2 * in, format, hidden, width, sigma)};
}

int64_t DeviceBench::MlpBytes(WeightFormat format, int hidden, int width) const {
  return 2 * MatrixBytes(format, width, hidden) + MatrixBytes(format, hidden, width);
}

double DeviceBench::GraphUs(const std::function<void(int)>& work, int per_graph) {
  for (int i = 0; i < per_graph; ++i) work(i);
  CHECK(cudaStreamSynchronize(stream()) == cudaSuccess);
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  for (int i = 0; i < per_graph; ++i) work(i);
  CHECK(cudaStreamEndCapture(stream(), &graph) == cudaSuccess);
  CHECK(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
  std::vector<float> ms =
      TimesMs(stream(), replays_, [&] { cudaGraphLaunch(executable, stream()); });
  const absl::Status error = device_.compute().TakeError();
  CHECK(error.ok()) << error;
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  return MedianUs(std::move(ms)) / per_graph;
}

double DeviceBench::CallUs(const std::function<void()>& work) {
  return MedianUs(TimesMs(stream(), replays_, work));
}

DeviceCeilings DeviceBench::MeasureCeilings(bool tiny) {
  const int64_t size_bytes = tiny ? kMiB : kGiB;
  const int side = tiny ? 64 : 8192;
  MakeOps({.max_tokens = side / 2, .hidden = side, .num_heads = 1, .max_head_dim = 128});
  std::byte* a = Allocate(size_bytes);
  std::byte* b = Allocate(size_bytes);
  auto* sink = reinterpret_cast<uint32_t*>(Allocate(4));
  const Matrix w = Random(side, side, 0.02f);
  const void* x = Activations(side / 2, side);
  void* y = Activations(side / 2, side);
  CHECK(cudaMemset(a, 1, static_cast<size_t>(size_bytes)) == cudaSuccess);
  const double read_us =
      CallUs([&] { CHECK(LaunchDeviceRead(stream(), a, size_bytes, sink) == cudaSuccess); });
  // Not in a graph: there the driver copies by an engine that is slower than a kernel.
  const double copy_us = CallUs([&] { device_.compute().Copy(b, a, size_bytes); });
  const double product_us = CallUs([&] { ops_->Linear(side / 2, x, w, y, false); });
  const double bytes = static_cast<double>(size_bytes);
  return {.read_bytes_per_us = bytes / read_us,
          .copy_bytes_per_us = 2 * bytes / copy_us,
          .product_flops_per_us = 1.0 * side * side * side / product_us};
}

}  // namespace writescope::bench
