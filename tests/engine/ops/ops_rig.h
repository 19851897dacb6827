// A CPU device with its operations, memory on it, and seeded data.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "engine/ops/cpu_ops.h"

namespace writescope::ops {

class OpsRig {
 public:
  // Ends the process when the device cannot be made: nothing could be tested.
  OpsRig(int num_threads, const OpsLimits& limits);

  Ops& ops() { return *ops_; }
  device::CpuDevice& device() { return *device_; }
  // Device memory that lives as long as the rig.
  std::byte* Allocate(int64_t size_bytes);
  float* Floats(int64_t count) {
    return reinterpret_cast<float*>(Allocate(count * static_cast<int64_t>(sizeof(float))));
  }
  float* Upload(const std::vector<float>& values);
  Matrix Load(const std::vector<float>& values, int64_t rows, int64_t cols, WeightType type,
              WeightFormat format = WeightFormat::kSource);
  // Waits for everything launched, then copies.
  std::vector<float> Download(const float* from, int64_t count);
  void Finish();

 private:
  std::unique_ptr<device::CpuDevice> device_;
  std::unique_ptr<Ops> ops_;
  std::vector<device::Buffer> buffers_;
};

// N(0, sigma^2), rounded to what bf16 represents, so that a weight is the same in either type.
std::vector<float> Bf16Values(int64_t count, float sigma, std::mt19937_64& rng);

// Fails the test unless |got - want| <= tolerance for all, NaN included.
void ExpectNear(const std::vector<float>& got, const std::vector<double>& want, double tolerance);

// y = x * W^T in double.
std::vector<double> MatMul(const std::vector<double>& x, const std::vector<float>& w, int64_t rows,
                           int64_t n, int64_t k);
std::vector<double> ToDouble(const std::vector<float>& values);

inline constexpr double kLog2E = 1.4426950408889634;

// 10000^(-i / half) for i in [0, half).
std::vector<float> InverseFrequencies(int half);
// The mean of the first `seen` values, weighted by e^score, in double.
std::vector<double> PlainSoftmax(const std::vector<double>& scores, int seen,
                                 const std::vector<std::vector<double>>& values);
AttendState MakeState(OpsRig& rig, int num_rows, int num_heads, int v_dim);

// Calls scenario(num_threads) with one thread and with three: both must give the same bits. Returns
// the result.
template <typename Scenario>
std::vector<float> SameForAnyThreads(const Scenario& scenario);

bool SameBits(const std::vector<float>& a, const std::vector<float>& b);
void FailDifferentBits();

template <typename Scenario>
std::vector<float> SameForAnyThreads(const Scenario& scenario) {
  std::vector<float> alone = scenario(1);
  for (int i = 0; i < 2; ++i) {  // Twice: threads take their items in another order each time.
    if (!SameBits(alone, scenario(3))) FailDifferentBits();
  }
  return alone;
}

}  // namespace writescope::ops
