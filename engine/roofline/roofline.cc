#include "engine/roofline/roofline.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace writescope::roofline {
namespace {

// Above any machine of this decade, and far from where a product of two of them would overflow.
constexpr double kMaxBytes = 1e18;
constexpr double kMaxRate = 1e18;
// Halvings of an interval of shares: to 1e-9.
constexpr int kBisections = 30;
constexpr double kShortWay = 0.01;

double Bounded(double value, double max) {
  if (!(value > 0)) return 0;  // NaN too.
  return std::min(value, max);
}

// Time for `bytes` at `rate`, both already bounded.
double Seconds(double bytes, double rate) {
  if (!(bytes > 0)) return 0;
  if (!(rate > 0)) return kNeverSeconds;
  return std::min(bytes / rate, kNeverSeconds);
}

// A load and rates that can be computed with: finite, not negative, "alone" never below "with".
struct Problem {
  double spilled_bytes;
  ShareInterval feasible;
  double dense_seconds;
  double resident_seconds;
  double handoff_seconds;
  double ahead_bytes;  // What the link can stream before the CPU has a query.
  Rates rates;
};

void FixPair(double& alone, double& with) {
  alone = Bounded(alone, kMaxRate);
  with = Bounded(with, kMaxRate);
  if (with == 0) with = alone;
  alone = std::max(alone, with);
}

Problem MakeProblem(const StepLoad& load, const Rates& rates) {
  Problem p;
  p.spilled_bytes = Bounded(load.spilled_bytes, kMaxBytes);
  p.feasible = FeasibleShares(load);
  p.dense_seconds = Bounded(load.dense_seconds, kNeverSeconds);
  p.resident_seconds = Bounded(load.device_attention_seconds, kNeverSeconds);
  p.handoff_seconds = Bounded(load.handoff_seconds, kNeverSeconds);
  p.rates = rates;
  FixPair(p.rates.cpu_alone, p.rates.cpu_with_link);
  FixPair(p.rates.link_alone, p.rates.link_with_cpu);
  p.rates.device = Bounded(rates.device, kMaxRate);
  const double ahead = std::isnan(load.ahead_fraction) ? 1 : Bounded(load.ahead_fraction, 1);
  p.ahead_bytes = p.rates.link_alone * p.dense_seconds * ahead;
  return p;
}

double LinkBytes(const Problem& p, double share) { return p.spilled_bytes * (1 - share); }

// Until both sides have done their bytes, from the moment at which the CPU has its query.
double SharedWorkSeconds(const Problem& p, double share) {
  const Rates& r = p.rates;
  const double cpu_bytes = p.spilled_bytes * share;
  const double link_bytes = std::max(0.0, LinkBytes(p, share) - p.ahead_bytes);
  const double cpu_seconds = Seconds(cpu_bytes, r.cpu_with_link);
  const double link_seconds = Seconds(link_bytes, r.link_with_cpu);
  const double both = std::min(cpu_seconds, link_seconds);
  const double alone = cpu_seconds <= link_seconds
                           ? Seconds(link_bytes - r.link_with_cpu * both, r.link_alone)
                           : Seconds(cpu_bytes - r.cpu_with_link * both, r.cpu_alone);
  return std::min(both + alone, kNeverSeconds);
}

double DeviceAttentionSeconds(const Problem& p, double share) {
  const double streamed = p.rates.device > 0 ? Seconds(LinkBytes(p, share), p.rates.device) : 0;
  return std::min(p.resident_seconds + streamed, kNeverSeconds);
}

double SharedSeconds(const Problem& p, double share) {
  return std::max(SharedWorkSeconds(p, share), DeviceAttentionSeconds(p, share));
}

double HandoffSeconds(const Problem& p, double share) {
  return p.spilled_bytes > 0 && share > 0 ? p.handoff_seconds : 0;
}

double StepSeconds(const Problem& p, double share) {
  return std::min(p.dense_seconds + SharedSeconds(p, share) + HandoffSeconds(p, share),
                  kNeverSeconds);
}

double Feasible(const Problem& p, double share) {
  if (!(share >= p.feasible.min_share)) return p.feasible.min_share;  // NaN too.
  return std::min(share, p.feasible.max_share);
}

// Both sides finish together.
double MeetShare(const Problem& p) {
  const double cpu = p.rates.cpu_with_link;
  const double link = p.rates.link_with_cpu;
  const double left = p.spilled_bytes - p.ahead_bytes;
  if (!(left > 0) || !(cpu + link > 0)) return Feasible(p, 0);
  return Feasible(p, cpu / (cpu + link) * (left / p.spilled_bytes));
}

// From `best`, which costs less than `limit`, as far towards `wish` as that holds; a short way is
// not worth going.
template <typename Cost>
double Nearest(double best, double wish, const Cost& cost, double limit) {
  if (cost(wish) <= limit) return wish;
  double good = best;
  for (int i = 0; i < kBisections; ++i) {
    const double middle = good + (wish - good) / 2;
    (cost(middle) <= limit ? good : wish) = middle;
  }
  return std::abs(good - best) < kShortWay ? best : good;
}

// SharedSeconds is piecewise linear in the share, so its least value is at a border, at a kink of
// one of its two parts, or where the two parts cross.
template <typename Cost>
double LeastShare(const Problem& p, const Cost& cost) {
  const double meet = MeetShare(p);
  const double all_ahead =
      p.spilled_bytes > 0 ? Feasible(p, 1 - p.ahead_bytes / p.spilled_bytes) : 0;
  std::array<double, 4> kinks = {p.feasible.min_share, meet, all_ahead, p.feasible.max_share};
  std::sort(kinks.begin(), kinks.end());

  double best = meet;
  double best_cost = cost(meet);
  const auto consider = [&](double share) {
    const double share_cost = cost(share);
    if (share_cost >= best_cost) return;
    best = share;
    best_cost = share_cost;
  };
  for (const double kink : kinks) consider(kink);
  for (size_t i = 0; i + 1 < kinks.size(); ++i) {
    const double left = SharedWorkSeconds(p, kinks[i]) - DeviceAttentionSeconds(p, kinks[i]);
    const double right =
        SharedWorkSeconds(p, kinks[i + 1]) - DeviceAttentionSeconds(p, kinks[i + 1]);
    if ((left < 0) == (right < 0)) continue;
    const double at = left / (left - right);
    consider(Feasible(p, kinks[i] + at * (kinks[i + 1] - kinks[i])));
  }
  return Nearest(best, meet, cost, best_cost * (1 + kIndifferent));
}

BestShareResult Best(const Problem& p) {
  const double share = LeastShare(p, [&](double s) { return StepSeconds(p, s); });
  return {share, StepSeconds(p, share), SharedSeconds(p, share)};
}

// What the device does hidden behind the other part's attention is like attention whose time does
// not depend on the share.
Problem MakePingPongProblem(const StepLoad& load, const Rates& rates, double half_dense_seconds) {
  Problem p = MakeProblem(load, rates);
  const double dense = 2 * Bounded(half_dense_seconds, kNeverSeconds / 2);
  p.resident_seconds =
      std::min(p.resident_seconds + std::max(0.0, dense - p.dense_seconds), kNeverSeconds);
  return p;
}

}  // namespace

ShareInterval FeasibleShares(const StepLoad& load) {
  const double spilled = Bounded(load.spilled_bytes, kMaxBytes);
  if (spilled == 0) return {};
  const double min_share = std::min(1.0, Bounded(load.host_bytes, kMaxBytes) / spilled);
  const double max_share = 1 - std::min(1.0, Bounded(load.stream_bytes, kMaxBytes) / spilled);
  // Rigid bytes above S contradict themselves; what only the CPU can read has to be read by it.
  return {min_share, std::max(min_share, max_share)};
}

BestShareResult BestShare(const StepLoad& load, const Rates& rates) {
  return Best(MakeProblem(load, rates));
}

double PredictStep(const StepLoad& load, const Rates& rates, double share) {
  const Problem p = MakeProblem(load, rates);
  return StepSeconds(p, Feasible(p, share));
}

double PredictPingPong(const StepLoad& load, const Rates& rates, double half_dense_seconds,
                       double share) {
  const Problem p = MakePingPongProblem(load, rates, half_dense_seconds);
  return StepSeconds(p, Feasible(p, share));
}

BestShareResult BestPingPong(const StepLoad& load, const Rates& rates, double half_dense_seconds) {
  return Best(MakePingPongProblem(load, rates, half_dense_seconds));
}

double PingPongDenseSeconds(double half_dense_seconds, int num_layers) {
  return 2 * Bounded(half_dense_seconds, kNeverSeconds / 2) / std::max(num_layers, 1);
}

double AheadFraction(double link_alone, double dense_seconds, double ring_bytes, int num_layers) {
  const double in_dense_time =
      Bounded(link_alone, kMaxRate) * Bounded(dense_seconds, kNeverSeconds);
  const double in_ring = Bounded(ring_bytes, kMaxBytes) * std::max(num_layers, 0);
  return in_ring >= in_dense_time ? 1 : in_ring / in_dense_time;
}

double LinkRateForCopies(double link_bytes_per_second, double copy_bytes,
                         double copy_overhead_seconds) {
  const double rate = Bounded(link_bytes_per_second, kMaxRate);
  const double bytes = Bounded(copy_bytes, kMaxBytes);
  if (bytes == 0 || rate == 0) return rate;
  return bytes / (Seconds(bytes, rate) + Bounded(copy_overhead_seconds, kNeverSeconds));
}

}  // namespace writescope::roofline
