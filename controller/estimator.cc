#include "controller/estimator.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace writescope::controller {
namespace {

// Sharing memory costs a side at most this much of its rate; less is a mistake of the measurement.
constexpr double kMinContention = 0.2;
// A ratio of two parts of one step is taken only when each part is this much of it.
constexpr double kMinPart = 0.2;
constexpr double kMinAhead = 0.02;
// Of the attention time: a CPU that works this long beside an idle link has too much.
constexpr double kMaxTail = 0.03;
// Of the attention time: above it the device may be what everybody waited for.
constexpr double kMaxDevicePart = 0.8;
// A link with this many times what fits into D is never out of work there.
constexpr double kAmple = 1.2;
// A belief that cannot be tested gives way by this much a step.
constexpr double kRelax = 1.02;
// Of the D in which the link could stream all ahead: with less the CPU has a share that is worth a
// push, a fifth of what it would be without any head start.
constexpr double kAskAgain = 0.8;
// Some steps that have asked bring the trust back: as many as it takes to see that D is another.
constexpr double kTrustAgain = 1.1;
// No step takes longer; a clock that jumped does.
constexpr double kMaxStepSeconds = 3600;

double Clipped(double value) { return std::clamp(value, kMinContention, 1.0); }

bool IsTime(double seconds) { return seconds >= 0 && seconds <= kMaxStepSeconds; }

// Whether the fields of a sample can be true together. 1 % and 10 us for the rounding of many
// clocks.
bool Plausible(const StepSample& s) {
  if (!IsTime(s.step_seconds) || s.step_seconds == 0 || !IsTime(s.cpu_busy_seconds) ||
      !IsTime(s.link_busy_seconds) || !IsTime(s.both_busy_seconds) || !IsTime(s.dense_seconds) ||
      !IsTime(s.device_attention_seconds)) {
    return false;
  }
  const double slack = 0.01 * s.step_seconds + 1e-5;
  if (s.cpu_busy_seconds > s.step_seconds + slack) return false;
  if (s.dense_seconds > s.step_seconds + slack) return false;
  if (s.both_busy_seconds > std::min(s.cpu_busy_seconds, s.link_busy_seconds) + slack) return false;
  if (s.cpu_bytes_both_busy > s.cpu_bytes || s.link_bytes_both_busy > s.link_bytes) return false;
  return s.batch_size > 0 && s.spilled_bytes <= uint64_t{1} << 50 &&
         s.cpu_bytes <= uint64_t{1} << 50 && s.link_bytes <= uint64_t{1} << 50 &&
         s.resident_bytes <= uint64_t{1} << 50;
}

}  // namespace

Estimator::Estimator(const EstimatorOptions& options)
    : options_(options),
      cpu_{RobustMean(options.rate), RobustMean(options.rate)},
      link_{RobustMean(options.rate), RobustMean(options.rate)},
      device_(options.rate),
      ahead_(options.rate) {
  dense_.fill(RobustMean(options.dense));
  trust_.fill(1);
}

void Estimator::Seed(const roofline::Rates& rates) {
  const auto seed = [](double alone, double with, Side& side) {
    side.with_other.Seed(with > 0 ? with : alone);
    side.contention.Seed(alone > 0 && with > 0 ? Clipped(with / alone) : 1);
  };
  seed(rates.cpu_alone, rates.cpu_with_link, cpu_);
  seed(rates.link_alone, rates.link_with_cpu, link_);
  // Not the device: a profile holds the rate of its memory, attention is measured.
}

Estimator::Verdict Estimator::Add(const StepSample& s) {
  if (s.kind != StepKind::kDecode) return Verdict::kNotDecode;
  if (!Plausible(s)) return Verdict::kGarbage;
  AddDense(s);
  const double device_bytes =
      static_cast<double>(s.resident_bytes) + static_cast<double>(s.link_bytes);
  if (s.device_attention_seconds >= options_.min_busy_seconds &&
      device_bytes >= static_cast<double>(options_.min_bytes)) {
    device_.Add(device_bytes / s.device_attention_seconds);
  }
  if (s.spilled_bytes == 0) return Verdict::kNothingSpilled;
  AddSide({static_cast<double>(s.cpu_bytes), s.cpu_busy_seconds, s.both_busy_seconds,
           static_cast<double>(s.cpu_bytes_both_busy)},
          cpu_);
  AddSide({static_cast<double>(s.link_bytes), s.link_busy_seconds, s.both_busy_seconds,
           static_cast<double>(s.link_bytes_both_busy)},
          link_);
  AddAhead(s);
  ++num_used_;
  return Verdict::kUsed;
}

void Estimator::AddDense(const StepSample& s) {
  RobustMean& dense = dense_[static_cast<size_t>(BucketOf(s.batch_size))];
  // A prefill chunk in the step lengthens D by what other steps do not have.
  if (s.prefill_tokens > 0 && dense.measured()) return;
  // Without a query for the CPU all but attention may count as D, also what the device waited for
  // the link: no more than an upper limit. To believe it would give the link time for everything,
  // and the share would stay at 0. Without any D the share does not, and D is measured.
  const bool no_query = s.spilled_bytes > 0 && s.cpu_bytes == 0;
  if (!no_query || (dense.measured() && s.dense_seconds < dense.value())) {
    dense.Add(s.dense_seconds);
  }
  Doubt(s, no_query);
}

// A D in which all could be streamed ahead leaves the CPU without a query, and no such step tells
// when the machine is no longer as slow as that. So the table believes it less and less, until the
// CPU is asked again; and the more with each step that has asked.
void Estimator::Doubt(const StepSample& s, bool no_query) {
  double& trust = trust_[static_cast<size_t>(BucketOf(s.batch_size))];
  if (!no_query) {
    trust = std::min(1.0, trust * kTrustAgain);
    return;
  }
  const double ahead_bytes = rates().link_alone * AheadFraction() * DenseSeconds(s.batch_size);
  if (trust * ahead_bytes > kAskAgain * static_cast<double>(s.spilled_bytes)) trust /= kRelax;
}

void Estimator::AddSide(const SideSample& sample, Side& side) {
  if (sample.busy_seconds < options_.min_busy_seconds ||
      sample.bytes < static_cast<double>(options_.min_bytes)) {
    return;
  }
  const double both = std::min(sample.both_seconds, sample.busy_seconds);
  const double alone = sample.busy_seconds - both;
  const double bytes_alone = sample.bytes - sample.bytes_both;
  if (both >= kMinPart * sample.busy_seconds && alone >= kMinPart * sample.busy_seconds &&
      sample.bytes_both > 0 && bytes_alone > 0) {
    side.contention.Add(Clipped((sample.bytes_both / both) / (bytes_alone / alone)));
  }
  // bytes = with * both + (with / contention) * alone, solved for `with`. So a step in which the
  // two were never, or always, busy together still moves both rates, and a slower CPU is seen
  // either way.
  const double contention = side.contention.value() > 0 ? Clipped(side.contention.value()) : 1;
  const double with_other = sample.bytes / (both + alone / contention);
  if (side.with_other.Add(with_other) == RobustMean::Verdict::kChanged) ++side.changes;
}

// How long the link streamed before the CPU had its query. Only the ring keeps it from all of D,
// unless it runs out of work, which a link with more bytes than fit into D does not; or the device
// is itself the bottleneck, which hides what the link did.
void Estimator::AddAhead(const StepSample& s) {
  const double link_alone_rate = rates().link_alone;
  if (s.dense_seconds < options_.min_busy_seconds || link_alone_rate == 0) return;
  const double attention = s.step_seconds - s.dense_seconds;
  if (s.device_attention_seconds > kMaxDevicePart * attention) return;
  const double cpu_tail = s.cpu_busy_seconds - s.both_busy_seconds;
  if (cpu_tail > kMaxTail * attention) {
    // The CPU is busy beside an idle link. If it was given that much because the link was believed
    // to get little done ahead, the belief is wrong, and no step of this kind would ever correct
    // it.
    if (ahead_.measured() && ahead_.value() < 1) ahead_.Scale(kRelax);
    return;
  }
  const double unlimited_bytes = link_alone_rate * s.dense_seconds;
  if (static_cast<double>(s.link_bytes) < kAmple * unlimited_bytes) return;
  const double link_alone = s.link_busy_seconds - s.both_busy_seconds;
  const double link_tail = std::max(0.0, attention - s.cpu_busy_seconds);
  ahead_.Add(std::clamp((link_alone - link_tail) / s.dense_seconds, kMinAhead, 1.0));
}

double Estimator::AheadFraction() const {
  return ahead_.measured() ? std::min(ahead_.value(), 1.0) : 1;
}

roofline::Rates Estimator::rates() const {
  const auto alone = [](const Side& side) {
    return side.contention.value() > 0 ? side.with_other.value() / Clipped(side.contention.value())
                                       : side.with_other.value();
  };
  roofline::Rates rates;
  rates.cpu_with_link = cpu_.with_other.value();
  rates.cpu_alone = alone(cpu_);
  rates.link_with_cpu = link_.with_other.value();
  rates.link_alone = alone(link_);
  rates.device = device_.value();
  return rates;
}

int Estimator::BucketOf(uint32_t batch_size) {
  const int bucket = std::bit_width(std::max(batch_size, 1u) - 1);  // 1, 2, 3..4, 5..8, ...
  return std::min(bucket, kNumBuckets - 1);
}

double Estimator::DenseSeconds(uint32_t batch_size) const {
  const int bucket = BucketOf(batch_size);
  int below = bucket;
  while (below >= 0 && !dense_[static_cast<size_t>(below)].measured()) --below;
  int above = bucket;
  while (above < kNumBuckets && !dense_[static_cast<size_t>(above)].measured()) ++above;
  if (below < 0 && above >= kNumBuckets) return 0;
  if (below < 0) return dense_[static_cast<size_t>(above)].value();
  if (above >= kNumBuckets || above == below) return dense_[static_cast<size_t>(below)].value();
  const double low = dense_[static_cast<size_t>(below)].value();
  const double high = dense_[static_cast<size_t>(above)].value();
  return low + (high - low) * (bucket - below) / (above - below);
}

double Estimator::ResidentSeconds(uint64_t resident_bytes) const {
  return device_.value() > 0 ? static_cast<double>(resident_bytes) / device_.value() : 0;
}

std::vector<roofline::BatchLoad> Estimator::BatchLoads(uint32_t max_batch,
                                                       uint64_t resident_bytes) const {
  std::vector<roofline::BatchLoad> loads;
  for (int bucket = 0; bucket <= BucketOf(max_batch); ++bucket) {
    const uint32_t batch = 1u << bucket;
    loads.push_back({batch, trust_[static_cast<size_t>(bucket)] * DenseSeconds(batch),
                     ResidentSeconds(resident_bytes), AheadFraction()});
  }
  return loads;
}

}  // namespace writescope::controller
