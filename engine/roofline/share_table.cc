#include "engine/roofline/share_table.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace writescope::roofline {
namespace {

// Exact as a double, as are its neighbours at the distances that matter.
constexpr uint64_t kMaxSpilledBytes = uint64_t{1} << 60;

absl::Status ValidateBucket(const ShareBucket& bucket, size_t index) {
  const std::string where = absl::StrCat("share table bucket ", index);
  if (bucket.max_batch == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": max_batch is 0, at least 1 is needed"));
  }
  if (bucket.points.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(where, " has no points"));
  }
  if (bucket.points.size() > ShareTable::kMaxPoints) {
    return absl::InvalidArgumentError(absl::StrCat(where, " has ", bucket.points.size(),
                                                   " points, at most ", ShareTable::kMaxPoints,
                                                   " are taken"));
  }
  for (size_t i = 0; i < bucket.points.size(); ++i) {
    const SharePoint& point = bucket.points[i];
    if (!(point.share >= 0 && point.share <= 1)) {  // Refuses NaN too.
      return absl::InvalidArgumentError(
          absl::StrCat(where, " point ", i, ": share ", point.share, " is outside [0, 1]"));
    }
    if (point.spilled_bytes == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, " point ", i, ": spilled_bytes is 0, at least 1 is needed"));
    }
    if (i > 0 && point.spilled_bytes <= bucket.points[i - 1].spilled_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          where, " point ", i, ": spilled_bytes ", point.spilled_bytes, " is not above ",
          bucket.points[i - 1].spilled_bytes, " of the point before it"));
    }
  }
  return absl::OkStatus();
}

double InUnit(double share) {
  if (!(share >= 0)) return 0;  // NaN too.
  return std::min(share, 1.0);
}

double Interpolate(const std::vector<SharePoint>& points, uint64_t spilled_bytes) {
  if (points.empty()) return 0;
  const auto right = std::lower_bound(
      points.begin(), points.end(), spilled_bytes,
      [](const SharePoint& point, uint64_t bytes) { return point.spilled_bytes < bytes; });
  if (right == points.begin()) return InUnit(right->share);
  if (right == points.end()) return InUnit(points.back().share);
  const SharePoint& a = *(right - 1);
  const double left_inverse = 1 / static_cast<double>(std::max<uint64_t>(a.spilled_bytes, 1));
  const double right_inverse = 1 / static_cast<double>(right->spilled_bytes);
  if (!(left_inverse > right_inverse)) return InUnit(right->share);
  const double at =
      (left_inverse - 1 / static_cast<double>(spilled_bytes)) / (left_inverse - right_inverse);
  return InUnit(a.share + at * (right->share - a.share));
}

const ShareBucket& BucketFor(const ShareTable& table, uint32_t batch_size) {
  for (const ShareBucket& bucket : table.buckets) {
    if (batch_size <= bucket.max_batch) return bucket;
  }
  return table.buckets.back();
}

// The roofline's curve of one batch size: computed on a fine grid, thinned to what a table needs.
class CurveSampler {
 public:
  CurveSampler(const TableSpec& spec, const BatchLoad& batch) : spec_(spec), batch_(batch) {}

  std::vector<SharePoint> Sample() const {
    const std::vector<SharePoint> grid = Grid();
    std::vector<SharePoint> points = {grid.front(), grid.back()};
    const size_t max_points =
        static_cast<size_t>(std::clamp(spec_.max_points, 2, ShareTable::kMaxPoints));
    // At least 1e-6: below it rounding is all that is left.
    const double tolerance = std::max(1e-6, spec_.tolerance);
    while (points.size() < max_points) {
      const SharePoint* worst = nullptr;
      double worst_error = tolerance;
      for (const SharePoint& point : grid) {
        const double error = Error(point.share, Interpolate(points, point.spilled_bytes));
        if (error <= worst_error) continue;
        worst_error = error;
        worst = &point;
      }
      if (worst == nullptr) break;
      points.insert(std::upper_bound(points.begin(), points.end(), *worst, Before), *worst);
    }
    return points;
  }

 private:
  // The curve may jump (to where a hand-off pays); the table smears a jump over one step of the
  // grid.
  static constexpr double kGridRatio = 1.04;

  // Of a small share a small error may be much: the CPU has a small share because it is slow.
  static double Error(double wanted, double share) {
    const double error = std::abs(wanted - share);
    return std::max(error, 0.1 * error / std::max({wanted, share, 1e-3}));
  }

  static bool Before(const SharePoint& a, const SharePoint& b) {
    return a.spilled_bytes < b.spilled_bytes;
  }

  std::vector<SharePoint> Grid() const {
    const uint64_t first = std::clamp<uint64_t>(spec_.min_spilled_bytes, 1, kMaxSpilledBytes - 1);
    const uint64_t last = std::clamp(spec_.max_spilled_bytes, first + 1, kMaxSpilledBytes);
    // Below this everything can be streamed ahead; the curve begins to rise here.
    const double bend = spec_.rates.link_alone * batch_.dense_seconds * batch_.ahead_fraction;
    std::vector<SharePoint> grid = {At(first)};
    const auto add = [&](double spilled_bytes) {
      if (!(spilled_bytes < static_cast<double>(last))) return;
      const uint64_t bytes = static_cast<uint64_t>(spilled_bytes);
      if (bytes > grid.back().spilled_bytes) grid.push_back(At(bytes));
    };
    double bytes = static_cast<double>(first);
    while (bytes < static_cast<double>(last)) {
      add(bytes);
      if (bend > bytes && bend < bytes * kGridRatio) add(bend);
      bytes = std::max(bytes * kGridRatio, bytes + 1);
    }
    grid.push_back(At(last));
    return grid;
  }

  SharePoint At(uint64_t spilled_bytes) const {
    StepLoad load;
    load.spilled_bytes = static_cast<double>(spilled_bytes);
    load.dense_seconds = batch_.dense_seconds;
    load.device_attention_seconds = batch_.device_attention_seconds;
    load.ahead_fraction = batch_.ahead_fraction;
    load.handoff_seconds = spec_.handoff_seconds;
    return {spilled_bytes, BestShare(load, spec_.rates).share};
  }

  const TableSpec& spec_;
  const BatchLoad& batch_;
};

}  // namespace

absl::Status ShareTable::Validate() const {
  if (buckets.empty()) return absl::InvalidArgumentError("share table has no buckets");
  if (buckets.size() > kMaxBuckets) {
    return absl::InvalidArgumentError(absl::StrCat(
        "share table has ", buckets.size(), " buckets, at most ", kMaxBuckets, " are taken"));
  }
  for (size_t i = 0; i < buckets.size(); ++i) {
    if (absl::Status status = ValidateBucket(buckets[i], i); !status.ok()) return status;
    if (i > 0 && buckets[i].max_batch <= buckets[i - 1].max_batch) {
      return absl::InvalidArgumentError(
          absl::StrCat("share table bucket ", i, ": max_batch ", buckets[i].max_batch,
                       " is not above ", buckets[i - 1].max_batch, " of the bucket before it"));
    }
  }
  return absl::OkStatus();
}

double ShareTable::Lookup(uint32_t batch_size, uint64_t spilled_bytes) const {
  if (buckets.empty()) return 0;
  return Interpolate(BucketFor(*this, batch_size).points, spilled_bytes);
}

ShareTable ConstantTable(double share) {
  return ShareTable{{ShareBucket{1, {SharePoint{1, InUnit(share)}}}}};
}

int ClampTable(ShareTable& table, const ShareInterval& interval) {
  const double min_share = InUnit(interval.min_share);
  const double max_share =
      std::max(min_share, std::isnan(interval.max_share) ? 1.0 : InUnit(interval.max_share));
  int moved = 0;
  for (ShareBucket& bucket : table.buckets) {
    for (SharePoint& point : bucket.points) {
      const double wanted = point.share;
      const double clamped = wanted >= min_share ? std::min(wanted, max_share) : min_share;
      if (clamped == wanted) continue;
      point.share = clamped;
      ++moved;
    }
  }
  return moved;
}

double MaxDifference(const ShareTable& a, const ShareTable& b) {
  double difference = 0;
  const auto compare_at_points_of = [&](const ShareTable& table) {
    for (const ShareBucket& bucket : table.buckets) {
      for (const SharePoint& point : bucket.points) {
        difference =
            std::max(difference, std::abs(a.Lookup(bucket.max_batch, point.spilled_bytes) -
                                          b.Lookup(bucket.max_batch, point.spilled_bytes)));
      }
    }
  };
  compare_at_points_of(a);
  compare_at_points_of(b);
  return difference;
}

std::string ToString(const ShareTable& table) {
  std::string text;
  for (const ShareBucket& bucket : table.buckets) {
    absl::StrAppend(&text, text.empty() ? "" : "; ", "<=", bucket.max_batch, ":");
    for (const SharePoint& point : bucket.points) {
      absl::StrAppendFormat(&text, "%s %.3fGiB %.3f", &point == &bucket.points.front() ? "" : ",",
                            static_cast<double>(point.spilled_bytes) / (1 << 30), point.share);
    }
  }
  return text;
}

ShareTable BuildShareTable(const TableSpec& spec) {
  std::vector<BatchLoad> batches = spec.batches;
  if (batches.empty()) batches.push_back({});
  ShareTable table;
  for (const BatchLoad& batch : batches) {
    const uint32_t lowest = table.buckets.empty() ? 1 : table.buckets.back().max_batch + 1;
    if (batch.max_batch < lowest || table.buckets.size() >= ShareTable::kMaxBuckets) continue;
    table.buckets.push_back({batch.max_batch, CurveSampler(spec, batch).Sample()});
  }
  if (table.buckets.empty()) {
    table.buckets.push_back({1, CurveSampler(spec, batches.front()).Sample()});
  }
  return table;
}

}  // namespace writescope::roofline
