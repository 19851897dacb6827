#include "tests/engine/ops/ops_rig.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/time/time.h"
#include "engine/base/bf16.h"
#include "engine/base/check.h"

namespace writescope::ops {

OpsRig::OpsRig(int num_threads, const OpsLimits& limits) {
  auto device = device::CpuDevice::Create({.budget_bytes = int64_t{1} << 30,
                                           .host_budget_bytes = 0,
                                           .compute_threads = num_threads,
                                           .link_bytes_per_s = 0});
  CHECK(device.ok()) << device.status();
  device_ = *std::move(device);
  auto ops = CreateCpuOps(*device_, limits);
  CHECK(ops.ok()) << ops.status();
  ops_ = *std::move(ops);
}

std::byte* OpsRig::Allocate(int64_t size_bytes) {
  auto buffer = device_->AllocateDevice(size_bytes, "test");
  CHECK(buffer.ok()) << buffer.status();
  buffers_.push_back(*std::move(buffer));
  return buffers_.back().data();
}

float* OpsRig::Upload(const std::vector<float>& values) {
  float* to = Floats(static_cast<int64_t>(values.size()));
  std::memcpy(to, values.data(), values.size() * sizeof(float));
  return to;
}

Matrix OpsRig::Load(const std::vector<float>& values, int64_t rows, int64_t cols, WeightType type,
                    WeightFormat format) {
  CHECK_EQ(static_cast<int64_t>(values.size()), rows * cols);
  std::vector<uint16_t> halves;
  for (const float value : values) halves.push_back(FloatToBf16(value));
  const void* from = type == WeightType::kBf16 ? static_cast<const void*>(halves.data())
                                               : static_cast<const void*>(values.data());
  std::byte* to = Allocate(ops_->footprint().matrix_bytes(type, format, rows, cols));
  auto matrix = ops_->LoadMatrix(to, type, format, rows, cols, static_cast<const std::byte*>(from));
  CHECK(matrix.ok()) << matrix.status();
  return *matrix;
}

std::vector<float> OpsRig::Download(const float* from, int64_t count) {
  std::vector<float> to(count);
  ops_->DownloadFloats(from, count, to.data());
  Finish();
  return to;
}

void OpsRig::Finish() {
  const absl::Status status = device_->compute().Record().Wait(absl::Seconds(60));
  CHECK(status.ok()) << status;
}

std::vector<float> Bf16Values(int64_t count, float sigma, std::mt19937_64& rng) {
  std::normal_distribution<float> normal(0, sigma);
  std::vector<float> values(count);
  for (float& value : values) value = Bf16ToFloat(FloatToBf16(normal(rng)));
  return values;
}

void ExpectNear(const std::vector<float>& got, const std::vector<double>& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], tolerance) << "at " << i;
}

std::vector<double> MatMul(const std::vector<double>& x, const std::vector<float>& w, int64_t rows,
                           int64_t n, int64_t k) {
  std::vector<double> y(rows * n);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t d = 0; d < k; ++d) y[r * n + i] += x[r * k + d] * w[i * k + d];
    }
  }
  return y;
}

std::vector<double> ToDouble(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

std::vector<float> InverseFrequencies(int half) {
  std::vector<float> values(half);
  for (int i = 0; i < half; ++i) {
    values[i] = std::pow(1e4f, -static_cast<float>(i) / static_cast<float>(half));
  }
  return values;
}

std::vector<double> PlainSoftmax(const std::vector<double>& scores, int seen,
                                 const std::vector<std::vector<double>>& values) {
  double maximum = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int t = 0; t < seen; ++t) maximum = std::max(maximum, scores[t]);
  std::vector<double> out(values[0].size());
  for (int t = 0; t < seen; ++t) {
    const double weight = std::exp(scores[t] - maximum);
    sum += weight;
    for (size_t d = 0; d < out.size(); ++d) out[d] += weight * values[t][d];
  }
  for (double& value : out) value /= sum;
  return out;
}

AttendState MakeState(OpsRig& rig, int num_rows, int num_heads, int v_dim) {
  return {.o = rig.Floats(int64_t{num_rows} * num_heads * v_dim),
          .m = rig.Floats(int64_t{num_rows} * num_heads),
          .l = rig.Floats(int64_t{num_rows} * num_heads)};
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void FailDifferentBits() { ADD_FAILURE() << "the result depends on the number of threads"; }

}  // namespace writescope::ops
