#include "engine/runtime/step_model.h"

#include <algorithm>
#include <bit>

namespace writescope::runtime {
namespace {

constexpr double kSmoothing = 0.2;
// Below these a rate says more about the clock than about the machine.
constexpr double kMinAttentionSeconds = 20e-6;
constexpr int64_t kMinAttentionBytes = 16 << 10;

int BucketOf(int batch_size) {
  return std::bit_width(static_cast<uint32_t>(std::max(batch_size, 1)) - 1);
}

}  // namespace

void StepModel::LearnDense(int batch_size, double seconds) {
  const int bucket = BucketOf(batch_size);
  const auto at =
      std::lower_bound(dense_.begin(), dense_.end(), bucket,
                       [](const Dense& dense, int wanted) { return dense.bucket < wanted; });
  if (at == dense_.end() || at->bucket != bucket) {
    dense_.insert(at, {bucket, seconds});
  } else {
    at->seconds += kSmoothing * (seconds - at->seconds);
  }
}

void StepModel::LearnDeviceAttention(int64_t bytes, double seconds) {
  if (bytes < kMinAttentionBytes || seconds < kMinAttentionSeconds) return;
  const double rate = static_cast<double>(bytes) / seconds;
  rates_.device += (device_measured_ ? kSmoothing : 1) * (rate - rates_.device);
  device_measured_ = true;
}

double StepModel::DenseSeconds(int batch_size) const {
  const int bucket = BucketOf(batch_size);
  double seconds = dense_.empty() ? 0 : dense_.front().seconds;
  for (const Dense& dense : dense_) {
    if (dense.bucket <= bucket) seconds = dense.seconds;
  }
  return seconds;
}

double StepModel::AheadFraction(double dense_seconds) const {
  return roofline::AheadFraction(rates_.link_alone, dense_seconds,
                                 static_cast<double>(options_.ring_bytes), options_.num_layers);
}

double StepModel::ResidentSeconds(int64_t bytes) const {
  return rates_.device > 0 ? static_cast<double>(bytes) / rates_.device : 0;
}

double StepModel::PredictSeconds(int batch_size, const StepBytes& bytes, double cpu_share) const {
  const double dense_seconds = DenseSeconds(batch_size);
  return roofline::PredictStep({.spilled_bytes = static_cast<double>(bytes.spilled),
                                .host_bytes = static_cast<double>(bytes.host),
                                .stream_bytes = static_cast<double>(bytes.stream),
                                .dense_seconds = dense_seconds,
                                .ahead_fraction = AheadFraction(dense_seconds),
                                .device_attention_seconds = ResidentSeconds(bytes.resident),
                                .handoff_seconds = options_.handoff_seconds},
                               rates_, cpu_share);
}

roofline::ShareTable StepModel::Table(int64_t device_bytes, int64_t max_spilled_bytes) const {
  roofline::TableSpec spec;
  spec.rates = rates_;
  spec.handoff_seconds = options_.handoff_seconds;
  spec.max_spilled_bytes = static_cast<uint64_t>(std::max<int64_t>(max_spilled_bytes, 1 << 20));
  for (const Dense& dense : dense_) {
    spec.batches.push_back({.max_batch = uint32_t{1} << dense.bucket,
                            .dense_seconds = dense.seconds,
                            .device_attention_seconds = ResidentSeconds(device_bytes),
                            .ahead_fraction = AheadFraction(dense.seconds)});
  }
  return roofline::BuildShareTable(spec);
}

}  // namespace writescope::runtime
