// A GPU with its operations, matrices of random weights on it, and the ways to time its work.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "engine/device/cuda/cuda_device.h"
#include "engine/ops/ops.h"
#include "tests/bench/dense_report.h"

namespace writescope::bench {

class DeviceBench {
 public:
  DeviceBench(device::CudaDevice& device, int replays) : device_(device), replays_(replays) {}

 protected:
  device::CudaDevice& device() { return device_; }
  cudaStream_t stream() { return device_.compute().stream(); }
  ops::Ops& ops() { return *ops_; }
  // Frees what was allocated before.
  void MakeOps(const ops::OpsLimits& limits);

  std::byte* Allocate(int64_t size_bytes);
  size_t num_buffers() const { return buffers_.size(); }
  // Frees what was allocated when there were more than `count` buffers.
  void FreeFrom(size_t count) { buffers_.resize(count); }

  int64_t MatrixBytes(ops::WeightFormat format, int64_t rows, int64_t cols) const;
  ops::Matrix Random(std::byte* to, ops::WeightFormat format, int64_t rows, int64_t cols,
                     float sigma);
  ops::Matrix Random(int64_t rows, int64_t cols, float sigma);
  void* Activations(int64_t rows, int64_t cols);
  ops::MlpWeights Mlp(std::byte* to, ops::WeightFormat format, int hidden, int width);
  int64_t MlpBytes(ops::WeightFormat format, int hidden, int width) const;

  // Microseconds of one of `per_graph` pieces, of which work(i) submits the i-th: the median of
  // replays of a graph of them all.
  double GraphUs(const std::function<void(int)>& work, int per_graph = 1);
  // Microseconds of one call that is not in a graph.
  double CallUs(const std::function<void()>& work);
  DeviceCeilings MeasureCeilings(bool tiny);

 private:
  device::CudaDevice& device_;
  const int replays_;
  std::unique_ptr<ops::Ops> ops_;
  std::vector<device::Buffer> buffers_;
  uint64_t seed_ = 0;
};

}  // namespace writescope::bench
