#include "engine/runtime/step_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace writescope::runtime {
namespace {

constexpr double kSmoothing = 0.2;
// Below these a rate says more about the clock than about the machine.
constexpr double kMinAttentionSeconds = 20e-6;
constexpr int64_t kMinAttentionBytes = 16 << 10;
// Steps of a batch before its D counts as known: those at the start are submitted call by call, and
// take longer than the recorded ones that a choice is about.
constexpr int kSettledSteps = 8;
// What a single step counts for at the most, of what steps have shown.
constexpr double kMostOfDense = 2;
constexpr double kMostOfRatio = 1.5;
// Less is within the error of the prediction. On an H200 two micro-batches took 3 to 15 % less than
// the whole batch where 2 to 6 % less were predicted; where 22 % were, 1 to 3 % more: what steps
// really take has the last word.
constexpr double kLeastGain = 0.02;

// D of one of two parts, at the least, in units of that of the whole batch: it reads all dense
// weights, and most of the experts. On an H200 it was .65 for 10 of 20 rows of Qwen3-30B-A3B.
constexpr double kLeastPartOfDense = 0.6;

// Of steps of a kind that say nothing of it, and then of those before what they say is acted on.
constexpr int kStepsThatRecord = 3;
constexpr int kStepsToJudge = 5;
// A D that is another than that in the table, as a fraction of it. Less is noise, and makes a step
// longer by some hundredths of D.
constexpr double kOtherDense = 0.1;
constexpr double kBetweenTablesSeconds = 1;

// By which a kind of step that is not taken comes nearer to the other with each step of that.
constexpr double kForgetting = 0.003;

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
    dense_.insert(at, {bucket, seconds, 1});
  } else {
    // A step that was recorded or interrupted says nothing of the machine, however long it took.
    const double most = at->num_steps >= kSettledSteps ? kMostOfDense * at->seconds : seconds;
    at->seconds += kSmoothing * (std::min(seconds, most) - at->seconds);
    ++at->num_steps;
  }
}

bool StepModel::Behind::known() const { return num_steps >= kStepsThatRecord + kStepsToJudge; }

void StepModel::Behind::Learn(double value) {
  ++num_steps;
  if (num_steps <= kStepsThatRecord) return;
  if (num_steps == kStepsThatRecord + 1) {
    ratio = value;
  } else {
    // One step that was interrupted decides nothing.
    ratio += kSmoothing * (std::min(value, kMostOfRatio * ratio) - ratio);
  }
}

void StepModel::LearnStep(const TakenStep& step) {
  if (step.predicted_seconds <= 0 || step.seconds <= 0) return;
  const int bucket = BucketOf(step.batch_size);
  auto at = std::find_if(kinds_.begin(), kinds_.end(),
                         [&](const Kinds& kinds) { return kinds.bucket == bucket; });
  if (at == kinds_.end()) at = kinds_.insert(at, {.bucket = bucket});
  Behind& taken = step.micro_batches == 1 ? at->whole : at->two;
  Behind& other = step.micro_batches == 1 ? at->two : at->whole;
  taken.Learn(step.seconds / step.predicted_seconds);
  if (taken.known() && other.known()) other.ratio += kForgetting * (taken.ratio - other.ratio);
  // One step before the ratio, whose prediction goes by it.
  if (step.micro_batches == 2 && at->two.num_steps >= kStepsThatRecord) {
    double& dense = at->part_dense_seconds;
    dense += (dense == 0 ? 1 : kSmoothing) * (step.part_dense_seconds - dense);
  }
}

StepModel::Kinds StepModel::KindsOf(int batch_size) const {
  const int bucket = BucketOf(batch_size);
  for (const Kinds& kinds : kinds_) {
    if (kinds.bucket == bucket) return kinds;
  }
  return {.bucket = bucket};
}

double StepModel::Kinds::TwoBehindWhole() const {
  if (!two.known()) return 1;
  if (!whole.known()) return std::numeric_limits<double>::infinity();
  return two.ratio / whole.ratio;
}

void StepModel::LearnDeviceAttention(int64_t bytes, double seconds) {
  if (bytes < kMinAttentionBytes || seconds < kMinAttentionSeconds) return;
  const double rate = static_cast<double>(bytes) / seconds;
  rates_.device += (device_measured_ ? kSmoothing : 1) * (rate - rates_.device);
  device_measured_ = true;
}

const StepModel::Dense* StepModel::FindDense(int batch_size) const {
  const int bucket = BucketOf(batch_size);
  const Dense* found = dense_.empty() ? nullptr : &dense_.front();
  for (const Dense& dense : dense_) {
    if (dense.bucket <= bucket) found = &dense;
  }
  return found;
}

double StepModel::DenseSeconds(int batch_size) const {
  const Dense* dense = FindDense(batch_size);
  return dense != nullptr ? dense->seconds : 0;
}

double StepModel::AheadFraction(double dense_seconds) const {
  return roofline::AheadFraction(rates_.link_alone, dense_seconds,
                                 static_cast<double>(options_.ring_bytes), options_.num_layers);
}

double StepModel::ResidentSeconds(int64_t bytes) const {
  return rates_.device > 0 ? static_cast<double>(bytes) / rates_.device : 0;
}

roofline::StepLoad StepModel::LoadOf(const StepBytes& bytes, double dense_seconds) const {
  return {.spilled_bytes = static_cast<double>(bytes.spilled),
          .host_bytes = static_cast<double>(bytes.host),
          .stream_bytes = static_cast<double>(bytes.stream),
          .dense_seconds = dense_seconds,
          .ahead_fraction = AheadFraction(dense_seconds),
          .device_attention_seconds = ResidentSeconds(bytes.resident),
          .handoff_seconds = options_.handoff_seconds};
}

double StepModel::PredictSeconds(int batch_size, const StepBytes& bytes, double cpu_share) const {
  return roofline::PredictStep(LoadOf(bytes, DenseSeconds(batch_size)), rates_, cpu_share);
}

StepModel::TwoParts StepModel::PlanTwoParts(const std::array<Part, 2>& parts, const Part& whole,
                                            double whole_share) const {
  const Dense* known = FindDense(whole.batch_size);
  if (known == nullptr) return {};
  const Kinds kinds = KindsOf(whole.batch_size);
  // What batches of a part's size took says little: it may be of the start, or of steps that were
  // not recorded, and is not renewed while the batch is large.
  const double part_dense = kinds.part_dense_seconds > 0
                                ? std::min(kinds.part_dense_seconds, known->seconds)
                                : kLeastPartOfDense * known->seconds;
  StepBytes bytes;
  for (const Part& part : parts) {
    bytes.spilled += part.bytes.spilled;
    bytes.host += part.bytes.host;
    bytes.stream += part.bytes.stream;
    bytes.resident += part.bytes.resident;
  }
  const roofline::BestShareResult best = roofline::BestPingPong(
      LoadOf(bytes, roofline::PingPongDenseSeconds(part_dense, options_.num_layers)), rates_,
      part_dense);
  TwoParts two = {.cpu_share = best.share, .seconds = best.step_seconds};
  // Nor is the step shorter than that of either part alone.
  for (const Part& part : parts) {
    two.seconds = std::max(
        two.seconds, roofline::PredictStep(LoadOf(part.bytes, part_dense), rates_, best.share));
  }
  const double whole_seconds = PredictSeconds(whole.batch_size, whole.bytes, whole_share);
  two.pays = known->num_steps >= kSettledSteps &&
             (kinds.is_trying_two() ||
              two.seconds * kinds.TwoBehindWhole() < (1 - kLeastGain) * whole_seconds);
  return two;
}

bool StepModel::HasChosen(int batch_size) const {
  const Dense* dense = FindDense(batch_size);
  const Kinds kinds = KindsOf(batch_size);
  // One more than it takes to settle: the plan of that step was the first that could be of two.
  return dense != nullptr && dense->num_steps > kSettledSteps && kinds.whole.known() &&
         !kinds.is_trying_two();
}

bool StepModel::TableIsOld(double now_s) const {
  if (dense_in_table_.empty()) return true;
  if (now_s < table_made_s_ + kBetweenTablesSeconds) return false;
  return std::any_of(dense_.begin(), dense_.end(), [&](const Dense& dense) {
    // As a table finds it: of the next larger batches, else of the largest.
    const auto at = std::find_if(dense_in_table_.begin(), dense_in_table_.end(),
                                 [&](const Dense& other) { return other.bucket >= dense.bucket; });
    const Dense& in_table = at != dense_in_table_.end() ? *at : dense_in_table_.back();
    return dense.num_steps >= kSettledSteps &&
           std::abs(dense.seconds - in_table.seconds) > kOtherDense * in_table.seconds;
  });
}

std::optional<roofline::ShareTable> StepModel::NewTable(double now_s) {
  if (!TableIsOld(now_s)) return std::nullopt;
  dense_in_table_ = dense_;
  table_made_s_ = now_s;
  roofline::TableSpec spec;
  // Those of the start: what attention of one kind of step gets of the device's memory says little
  // of others.
  spec.rates = options_.rates;
  spec.handoff_seconds = options_.handoff_seconds;
  spec.max_spilled_bytes =
      static_cast<uint64_t>(std::max<int64_t>(options_.host_kv_bytes, 1 << 20));
  const double resident_seconds =
      spec.rates.device > 0 ? static_cast<double>(options_.device_kv_bytes) / spec.rates.device : 0;
  for (const Dense& dense : dense_) {
    spec.batches.push_back({.max_batch = uint32_t{1} << dense.bucket,
                            .dense_seconds = dense.seconds,
                            .device_attention_seconds = resident_seconds,
                            .ahead_fraction = AheadFraction(dense.seconds)});
  }
  return roofline::BuildShareTable(spec);
}

}  // namespace writescope::runtime
