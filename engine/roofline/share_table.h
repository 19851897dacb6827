// ShareTable: what a controller pushes and a worker follows. For each range of batch sizes, the
// CPU's share as a function of the spilled bytes. Values; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/roofline/roofline.h"

namespace writescope::roofline {

struct SharePoint {
  uint64_t spilled_bytes = 0;  // At least 1.
  double share = 0;            // In [0, 1].
  friend bool operator==(const SharePoint&, const SharePoint&) = default;
};

// For batches of at most max_batch sequences.
struct ShareBucket {
  uint32_t max_batch = 0;
  std::vector<SharePoint> points;  // Ascending spilled_bytes.
  friend bool operator==(const ShareBucket&, const ShareBucket&) = default;
};

struct ShareTable {
  static constexpr int kMaxBuckets = 64;
  static constexpr int kMaxPoints = 256;  // Of one bucket.

  std::vector<ShareBucket> buckets;  // Ascending max_batch.

  // INVALID_ARGUMENT, with the place and the number, unless all of the above holds.
  absl::Status Validate() const;

  // Linear in 1 / spilled_bytes between points (the shape of the roofline's own curve), constant
  // outside. A batch above the last bucket uses the last. An empty table, or a NaN in it, gives 0.
  double Lookup(uint32_t batch_size, uint64_t spilled_bytes) const;

  friend bool operator==(const ShareTable&, const ShareTable&) = default;
};

// One share for every step.
ShareTable ConstantTable(double share);

// Moves every share into the interval; returns how many it had to move. A NaN becomes min_share.
int ClampTable(ShareTable& table, const ShareInterval& interval);

// The largest difference of the two in any bucket of either at any of its points.
double MaxDifference(const ShareTable& a, const ShareTable& b);

// "<=8: 64MiB 0.000, 1GiB 0.412; <=16: ..." for logs.
std::string ToString(const ShareTable& table);

// What the roofline needs to know of batches of up to max_batch sequences.
struct BatchLoad {
  uint32_t max_batch = 1;
  double dense_seconds = 0;
  double device_attention_seconds = 0;  // Over resident KV.
  double ahead_fraction = 1;            // As in StepLoad.
};

struct TableSpec {
  Rates rates;
  std::vector<BatchLoad> batches;  // Ascending max_batch; none gives one bucket with D = 0.
  double handoff_seconds = 0;      // Of all layers.
  // Range of spilled bytes to cover; the upper end is what the host pools can hold.
  uint64_t min_spilled_bytes = 1 << 16;
  uint64_t max_spilled_bytes = uint64_t{1} << 40;
  // Points are added until the table is this close to BestShare between them (and within ten times
  // that fraction of it), or are this many.
  double tolerance = 0.004;
  int max_points = 48;
};

// BestShare, sampled. Always valid: out-of-range settings are moved into range.
ShareTable BuildShareTable(const TableSpec& spec);

}  // namespace writescope::roofline
