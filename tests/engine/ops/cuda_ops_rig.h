// A GPU with its operations, memory on it, and the ways of values there and back: the counterpart
// of OpsRig, so that one scenario runs on either. Values go up rounded to the activation type.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "engine/base/bf16.h"
#include "engine/base/check.h"
#include "engine/ops/cuda/cuda_ops.h"
#include "tests/engine/ops/ops_rig.h"
#include "tests/support/gpu.h"

namespace writescope::ops {

class CudaRig {
 public:
  CudaRig(const OpsLimits& limits, const CudaOpsOptions& options) : options_(options) {
    auto device = device::CudaDevice::Create({.budget_bytes = 8 * kGiB});
    CHECK(device.ok()) << device.status();
    device_ = *std::move(device);
    auto ops = CreateCudaOps(*device_, limits, options);
    CHECK(ops.ok()) << ops.status();
    ops_ = *std::move(ops);
  }

  Ops& ops() { return *ops_; }
  device::CudaDevice& device() { return *device_; }

  std::byte* Allocate(int64_t size_bytes) {
    const int64_t before = testing::BytesBefore(size_bytes);
    auto buffer = device_->AllocateDevice(before + size_bytes, "test");
    CHECK(buffer.ok()) << buffer.status();
    buffers_.push_back(*std::move(buffer));
    return buffers_.back().data() + before;
  }
  float* Floats(int64_t count) { return reinterpret_cast<float*>(Allocate(count * 4)); }
  std::byte* HostMemory(int64_t size_bytes) {
    auto buffer = device_->AllocateHost(size_bytes, device::HostMemory::kPageLocked, "test");
    CHECK(buffer.ok()) << buffer.status();
    buffers_.push_back(*std::move(buffer));
    return buffers_.back().data();
  }
  // Activations.
  void* Upload(const std::vector<float>& values) {
    const int64_t count = static_cast<int64_t>(values.size());
    std::byte* to = Allocate(count * ops_->activation_bytes());
    std::vector<uint16_t> halves;
    for (const float value : values) halves.push_back(FloatToBf16(value));
    const void* from = ops_->activation_bytes() == 4 ? static_cast<const void*>(values.data())
                                                     : static_cast<const void*>(halves.data());
    CHECK(cudaMemcpy(to, from, static_cast<size_t>(count * ops_->activation_bytes()),
                     cudaMemcpyHostToDevice) == cudaSuccess);
    Settle();
    return to;
  }
  // Memory for activations, filled with what is no number, so that a hole shows.
  void* Poisoned(int64_t count) {
    std::byte* to = Allocate(count * ops_->activation_bytes());
    CHECK(cudaMemset(to, 0xff, static_cast<size_t>(count * ops_->activation_bytes())) ==
          cudaSuccess);
    Settle();
    return to;
  }
  Matrix Load(const std::vector<float>& values, int64_t rows, int64_t cols, WeightType type,
              WeightFormat format = WeightFormat::kSource) {
    return LoadTo(Allocate(ops_->footprint().matrix_bytes(type, format, rows, cols)), values, rows,
                  cols, type, format);
  }
  Matrix LoadTo(std::byte* to, const std::vector<float>& values, int64_t rows, int64_t cols,
                WeightType type, WeightFormat format) {
    std::vector<uint16_t> halves;
    for (const float value : values) halves.push_back(FloatToBf16(value));
    const void* from = type == WeightType::kBf16 ? static_cast<const void*>(halves.data())
                                                 : static_cast<const void*>(values.data());
    auto matrix =
        ops_->LoadMatrix(to, type, format, rows, cols, static_cast<const std::byte*>(from));
    CHECK(matrix.ok()) << matrix.status();
    return *matrix;
  }
  // Activations as floats, by the call under test.
  std::vector<float> Download(const void* from, int64_t count) {
    float* to = reinterpret_cast<float*>(HostMemory(count * 4));
    ops_->DownloadFloats(from, count, to);
    Finish();
    return {to, to + count};
  }
  std::vector<std::byte> Bytes(const void* from, int64_t size_bytes) {
    Finish();
    std::vector<std::byte> to(static_cast<size_t>(size_bytes));
    CHECK(cudaMemcpy(to.data(), from, to.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
    return to;
  }
  void Finish() {
    const absl::Status status = device_->compute().Record().Wait(absl::Seconds(60));
    CHECK(status.ok()) << status;
    const absl::Status error = device_->compute().TakeError();
    CHECK(error.ok()) << error;
  }

  // The queue does not wait for what goes past it.
  static void Settle() { CHECK(cudaDeviceSynchronize() == cudaSuccess); }

 private:
  const CudaOpsOptions options_;
  std::unique_ptr<device::CudaDevice> device_;
  std::unique_ptr<Ops> ops_;
  std::vector<device::Buffer> buffers_;
};

// What OpsRig has under other names.
inline std::vector<std::byte> BytesOf(OpsRig& rig, const void* from, int64_t size_bytes) {
  rig.Finish();
  const auto* bytes = static_cast<const std::byte*>(from);
  return {bytes, bytes + size_bytes};
}
inline std::vector<std::byte> BytesOf(CudaRig& rig, const void* from, int64_t size_bytes) {
  return rig.Bytes(from, size_bytes);
}
inline void* Output(OpsRig& rig, int64_t count) { return rig.Floats(count); }
inline void* Output(CudaRig& rig, int64_t count) { return rig.Poisoned(count); }

template <typename Rig>
std::vector<float> FloatsOf(Rig& rig, const float* from, int64_t count) {
  const std::vector<std::byte> bytes = BytesOf(rig, from, count * 4);
  std::vector<float> values(static_cast<size_t>(count));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}
template <typename Rig>
std::vector<float> ValuesOf(Rig& rig, const void* from, int64_t count) {
  return rig.Download(static_cast<const float*>(from), count);
}
template <typename Rig>
const float* Vector(Rig& rig, const std::vector<float>& values) {
  const int64_t count = static_cast<int64_t>(values.size());
  auto vector = rig.ops().LoadVector(rig.Allocate(Ops::vector_bytes(count)), count, values.data());
  CHECK(vector.ok()) << vector.status();
  return *vector;
}

// |got - want| <= absolute + relative * |want| everywhere; a NaN fails. The largest excess is told.
inline void ExpectClose(const std::vector<float>& got, const std::vector<float>& want,
                        double absolute, double relative) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const double bound = absolute + relative * std::abs(static_cast<double>(want[i]));
    ASSERT_LE(std::abs(static_cast<double>(got[i]) - want[i]), bound)
        << "at " << i << ": " << got[i] << ", not " << want[i];
  }
}

// Half a unit in the last of the 8 places of bf16, relative, at most.
inline constexpr double kBf16Round = 1.0 / 256;

}  // namespace writescope::ops
