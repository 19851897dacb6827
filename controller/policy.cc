#include "controller/policy.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/base/number_text.h"
#include "engine/base/status_macros.h"

namespace writescope::controller {
namespace {

using roofline::ShareTable;

// Steps unlike the present one may be this much further off before a renewal updates them: near
// where the curve begins to rise every share follows the noise of D.
constexpr double kFarFactor = 4;

absl::Status CheckFraction(const char* name, double value, double max) {
  if (value >= 0 && value <= max) return absl::OkStatus();  // Refuses NaN too.
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is ", NumberText(value), ", it has to be from 0 to ", max));
}

double Within(const roofline::ShareInterval& interval, double share) {
  ShareTable table = roofline::ConstantTable(share);
  roofline::ClampTable(table, interval);
  return table.Lookup(1, 1);
}

// Holds every point within max_change of what is in force.
int LimitChange(ShareTable& table, const ShareTable& in_force, double max_change) {
  int limited = 0;
  for (roofline::ShareBucket& bucket : table.buckets) {
    for (roofline::SharePoint& point : bucket.points) {
      const double before = in_force.Lookup(bucket.max_batch, point.spilled_bytes);
      const double share = std::clamp(point.share, std::max(0.0, before - max_change),
                                      std::min(1.0, before + max_change));
      if (share == point.share) continue;
      point.share = share;
      ++limited;
    }
  }
  return limited;
}

// A point for the present step, so that what holds at the points holds for it exactly.
void AddPoint(ShareTable& table, uint32_t batch_size, uint64_t spilled_bytes) {
  if (spilled_bytes == 0) return;
  const double share = table.Lookup(batch_size, spilled_bytes);
  for (roofline::ShareBucket& bucket : table.buckets) {
    if (batch_size > bucket.max_batch && &bucket != &table.buckets.back()) continue;
    const auto at = std::lower_bound(bucket.points.begin(), bucket.points.end(), spilled_bytes,
                                     [](const roofline::SharePoint& point, uint64_t bytes) {
                                       return point.spilled_bytes < bytes;
                                     });
    const bool there = at != bucket.points.end() && at->spilled_bytes == spilled_bytes;
    if (!there && bucket.points.size() < ShareTable::kMaxPoints) {
      bucket.points.insert(at, {spilled_bytes, share});
    }
    return;
  }
}

// A share on the way to the wanted one may be slower than no sharing at all; such a point goes
// where it is wanted at once, or, should that be slow as well, to the lowest share.
int Guard(const PolicyOptions& options, const PolicyInput& input, const ShareTable& wanted,
          ShareTable& table) {
  AddPoint(table, input.batch_size, input.spilled_bytes);
  const double lowest = Within(input.allowed, 0);
  int guarded = 0;
  for (roofline::ShareBucket& bucket : table.buckets) {
    for (roofline::SharePoint& point : bucket.points) {
      const roofline::StepLoad load =
          LoadFor(input.spec, bucket.max_batch, static_cast<double>(point.spilled_bytes));
      const auto predict = [&](double share) {
        return roofline::PredictStep(load, input.spec.rates, share);
      };
      const double limit = predict(lowest) * (1 + options.guard);
      if (predict(point.share) <= limit) continue;
      const double best = wanted.Lookup(bucket.max_batch, point.spilled_bytes);
      point.share = predict(best) <= limit ? best : lowest;
      ++guarded;
    }
  }
  return guarded;
}

// What ought to be in force after this decision, were it pushed.
ShareTable Candidate(const PolicyOptions& options, const PolicyInput& input,
                     const ShareTable& wanted, Decision& decision) {
  ShareTable table = wanted;
  if (options.pin_share.has_value()) return table;
  if (input.in_force.has_value()) {
    decision.num_limited = LimitChange(table, *input.in_force, options.max_change);
  }
  // What is in force may lie outside an interval that has moved since.
  decision.num_clamped += roofline::ClampTable(table, input.allowed);
  decision.num_guarded = Guard(options, input, wanted, table);
  return table;
}

// How much slower the present step is by what is in force than it has to be.
double LossNow(const PolicyInput& input, const ShareTable& wanted) {
  const roofline::StepLoad load =
      LoadFor(input.spec, input.batch_size, static_cast<double>(input.spilled_bytes));
  const auto predict = [&](const ShareTable& table) {
    return roofline::PredictStep(load, input.spec.rates,
                                 table.Lookup(input.batch_size, input.spilled_bytes));
  };
  const double needed = predict(wanted);
  return needed > 0 ? predict(*input.in_force) / needed - 1 : 0;
}

void ChooseAction(const PolicyOptions& options, const PolicyInput& input, const ShareTable& wanted,
                  ShareTable candidate, Decision& decision) {
  const bool pinned = options.pin_share.has_value();
  const auto take = [&](Action action, std::string reason) {
    decision.action = action;
    decision.reason = std::move(reason);
    decision.table = std::move(candidate);
  };
  if (!pinned && input.num_steps_seen < options.min_steps) {
    decision.reason = absl::StrCat("only ", input.num_steps_seen, " of ", options.min_steps,
                                   " steps with spilled KV seen");
    return;
  }
  if (!input.in_force.has_value()) {
    return take(Action::kPush, pinned ? "pinned by the operator" : "first table");
  }
  const double near =
      DifferenceNear(candidate, *input.in_force, input.batch_size, input.spilled_bytes);
  if (pinned) {
    if (near > 0) return take(Action::kPush, "pinned by the operator");
  } else {
    if (near > options.hysteresis) {
      return take(Action::kPush, absl::StrFormat("share moved by %.3f", near));
    }
    const double loss = LossNow(input, wanted);
    if (loss > options.max_loss) {
      return take(Action::kPush, absl::StrFormat("step slower than need be by %.3f", loss));
    }
  }
  if (!input.lease_due) {
    decision.reason = absl::StrFormat("within the hysteresis: %.3f", near);
    return;
  }
  if (roofline::MaxDifference(candidate, *input.in_force) > kFarFactor * options.hysteresis) {
    return take(Action::kRenew, "lease renewed, with other steps' shares");
  }
  decision.action = Action::kRenew;
  decision.reason = "lease renewed";
}

}  // namespace

const char* ActionName(Action action) {
  switch (action) {
    case Action::kHold:
      return "hold";
    case Action::kPush:
      return "push";
    case Action::kRenew:
      return "renew";
  }
  return "unknown";
}

absl::Status PolicyOptions::Validate() const {
  RETURN_IF_ERROR(CheckFraction("hysteresis", hysteresis, 0.5));
  RETURN_IF_ERROR(CheckFraction("max-loss", max_loss, 1));
  RETURN_IF_ERROR(CheckFraction("max-change", max_change, 1));
  if (max_change < hysteresis || max_change <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("max-change is ", NumberText(max_change), ", below the hysteresis ",
                     NumberText(hysteresis), ": no share could ever move"));
  }
  RETURN_IF_ERROR(CheckFraction("guard", guard, 1));
  if (pin_share.has_value()) RETURN_IF_ERROR(CheckFraction("pin-share", *pin_share, 1));
  return absl::OkStatus();
}

roofline::StepLoad LoadFor(const roofline::TableSpec& spec, uint32_t batch_size,
                           double spilled_bytes) {
  roofline::StepLoad load;
  load.spilled_bytes = spilled_bytes;
  load.handoff_seconds = spec.handoff_seconds;
  for (const roofline::BatchLoad& batch : spec.batches) {
    load.dense_seconds = batch.dense_seconds;
    load.device_attention_seconds = batch.device_attention_seconds;
    load.ahead_fraction = batch.ahead_fraction;
    if (batch_size <= batch.max_batch) break;
  }
  return load;
}

double DifferenceNear(const ShareTable& a, const ShareTable& b, uint32_t batch_size,
                      uint64_t spilled_bytes) {
  if (spilled_bytes == 0) return roofline::MaxDifference(a, b);
  double difference = 0;
  for (const double factor : {0.5, 1.0, 2.0, 4.0}) {
    const double bytes = std::min(static_cast<double>(spilled_bytes) * factor, 1e18);
    const uint64_t at = std::max<uint64_t>(static_cast<uint64_t>(bytes), 1);
    difference =
        std::max(difference, std::abs(a.Lookup(batch_size, at) - b.Lookup(batch_size, at)));
  }
  return difference;
}

Decision Decide(const PolicyOptions& options, const PolicyInput& input) {
  // It may come from the worker, and a renewal would hand it back as it is.
  if (input.in_force.has_value() && !input.in_force->Validate().ok()) {
    PolicyInput without = input;
    without.in_force.reset();
    return Decide(options, without);
  }
  Decision decision;
  ShareTable wanted = options.pin_share.has_value() ? roofline::ConstantTable(*options.pin_share)
                                                    : roofline::BuildShareTable(input.spec);
  decision.num_clamped = roofline::ClampTable(wanted, input.allowed);
  if (input.in_force.has_value()) decision.table = *input.in_force;
  ChooseAction(options, input, wanted, Candidate(options, input, wanted, decision), decision);

  const roofline::StepLoad load =
      LoadFor(input.spec, input.batch_size, static_cast<double>(input.spilled_bytes));
  const auto predict = [&](double share) {
    return roofline::PredictStep(load, input.spec.rates, share);
  };
  decision.share = decision.table.Lookup(input.batch_size, input.spilled_bytes);
  decision.wanted_share = wanted.Lookup(input.batch_size, input.spilled_bytes);
  decision.predicted_seconds = predict(decision.share);
  decision.predicted_wanted_seconds = predict(decision.wanted_share);
  decision.predicted_lowest_seconds = predict(Within(input.allowed, 0));
  return decision;
}

}  // namespace writescope::controller
