// Pure: which region a sealed block goes to.
#pragma once

#include <array>
#include <cstdint>

#include "engine/kvcache/region.h"

namespace writescope::kvcache {

// What a placement sees of the regions, by RegionKind. Blocks.
struct RegionFill {
  std::array<int64_t, kNumRegions> capacity{};
  std::array<int64_t, kNumRegions> available{};  // Free, or freed by evicting what nobody uses
};

// How much of the device region a sequence may have. Blocks.
struct DeviceQuota {
  int64_t blocks = 0;     // At most
  int64_t keep_free = 0;  // Left to others, also within `blocks`
};

// A sequence that fits into the device region whole gets it whole; a larger one gets three quarters
// of what is available, at least its proportional part, so that the next one finds room too. A part
// of the region (1/32) is kept for short sequences, of which at least two fit there: beside long
// ones that have taken all else, a chat must not wait for the link. Copies of streamed blocks may
// lie in it: they give way.
DeviceQuota DeviceQuotaFor(int64_t expected_blocks, const RegionFill& fill);

struct PlacementRequest {
  int64_t device_blocks = 0;  // Of the sequence, there already
  DeviceQuota device_quota;
  // Spilled blocks of all sequences below which nothing goes to `host`: while little is spilled the
  // best share is near 0, and bytes that only the CPU reads would slow each step.
  int64_t host_after_spilled_blocks = 0;
};

// The region for the next block: the device within the quota, else the host region furthest below
// its part of the host capacity. Falls back to any region with room. False: none has.
bool ChooseRegion(const PlacementRequest& request, const RegionFill& fill, RegionKind* kind);

// Host capacity divided over the regions such that shares in [min_cpu_share, max_cpu_share] are
// reachable without moving a byte: `host` is the lower end, `stream` ends it above.
std::array<int64_t, kNumRegions> DivideHostBlocks(int64_t host_blocks, double min_cpu_share,
                                                  double max_cpu_share);

}  // namespace writescope::kvcache
