#include "engine/kvcache/placement_plan.h"

#include <algorithm>

namespace writescope::kvcache {
namespace {

// The part of the device region that is kept for short sequences, and how many of the longest of
// them fit there.
constexpr int64_t kShortReserveDivisor = 32;
constexpr int64_t kShortOfReserve = 2;

size_t At(RegionKind kind) { return static_cast<size_t>(kind); }

}  // namespace

DeviceQuota DeviceQuotaFor(int64_t expected_blocks, const RegionFill& fill) {
  const int64_t reserve = fill.capacity[At(RegionKind::kDevice)] / kShortReserveDivisor;
  const bool is_short = expected_blocks <= reserve / kShortOfReserve;
  const int64_t keep_free = is_short ? 0 : reserve;
  const int64_t device_available =
      std::max<int64_t>(0, fill.available[At(RegionKind::kDevice)] - keep_free);
  if (expected_blocks <= device_available) return {expected_blocks, keep_free};
  int64_t total_capacity = 0;
  for (const int64_t capacity : fill.capacity) total_capacity += capacity;
  const int64_t device_capacity = fill.capacity[At(RegionKind::kDevice)];
  const int64_t proportional =
      total_capacity == 0 ? 0 : expected_blocks * device_capacity / total_capacity;
  return {std::min(device_available, std::max(proportional, device_available * 3 / 4)), keep_free};
}

bool ChooseRegion(const PlacementRequest& request, const RegionFill& fill, RegionKind* kind) {
  if (request.device_blocks < request.device_quota.blocks &&
      fill.available[At(RegionKind::kDevice)] > request.device_quota.keep_free) {
    *kind = RegionKind::kDevice;
    return true;
  }
  int64_t host_capacity = 0;
  int64_t host_used = 0;
  for (const RegionKind region : kAllRegions) {
    if (!IsSpilled(region)) continue;
    host_capacity += fill.capacity[At(region)];
    host_used += fill.capacity[At(region)] - fill.available[At(region)];
  }
  // Swing is looked at first, so that it wins a tie: its bytes are worth most to the balance.
  constexpr RegionKind kBySlack[] = {RegionKind::kSwing, RegionKind::kStream, RegionKind::kHost};
  bool found = false;
  double furthest_below = 0;
  for (const RegionKind region : kBySlack) {
    if (fill.available[At(region)] <= 0) continue;
    if (region == RegionKind::kHost && host_used < request.host_after_spilled_blocks) continue;
    const double part =
        static_cast<double>(fill.capacity[At(region)]) / static_cast<double>(host_capacity);
    const double used = static_cast<double>(fill.capacity[At(region)] - fill.available[At(region)]);
    const double below = part * static_cast<double>(host_used + 1) - used;
    if (!found || below > furthest_below + 1e-9) {
      found = true;
      furthest_below = below;
      *kind = region;
    }
  }
  if (found) return true;
  for (const RegionKind region : {RegionKind::kHost, RegionKind::kDevice}) {
    if (fill.available[At(region)] > 0) {
      *kind = region;
      return true;
    }
  }
  return false;
}

std::array<int64_t, kNumRegions> DivideHostBlocks(int64_t host_blocks, double min_cpu_share,
                                                  double max_cpu_share) {
  std::array<int64_t, kNumRegions> blocks{};
  const int64_t host = static_cast<int64_t>(min_cpu_share * static_cast<double>(host_blocks));
  const int64_t stream =
      static_cast<int64_t>((1 - max_cpu_share) * static_cast<double>(host_blocks));
  blocks[At(RegionKind::kHost)] = host;
  blocks[At(RegionKind::kStream)] = stream;
  blocks[At(RegionKind::kSwing)] = host_blocks - host - stream;
  return blocks;
}

}  // namespace writescope::kvcache
