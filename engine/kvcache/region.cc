#include "engine/kvcache/region.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/check.h"
#include "engine/base/status_macros.h"

namespace writescope::kvcache {

std::string_view RegionName(RegionKind kind) {
  switch (kind) {
    case RegionKind::kDevice:
      return "device";
    case RegionKind::kStream:
      return "stream";
    case RegionKind::kSwing:
      return "swing";
    case RegionKind::kHost:
      return "host";
  }
  return "unknown";
}

absl::StatusOr<Region> Region::Create(RegionKind kind, const KvGeometry& geometry, int num_layers,
                                      int num_blocks, device::Device& device) {
  const int64_t size_bytes = geometry.block_bytes() * num_layers * num_blocks;
  device::Buffer memory;
  if (num_blocks > 0) {
    const std::string label = absl::StrCat("KV region ", std::string(RegionName(kind)));
    if (kind == RegionKind::kDevice) {
      ASSIGN_OR_RETURN(memory, device.AllocateDevice(size_bytes, label));
    } else {
      ASSIGN_OR_RETURN(
          memory, device.AllocateHost(size_bytes,
                                      kind == RegionKind::kHost ? device::HostMemory::kPageable
                                                                : device::HostMemory::kPageLocked,
                                      label));
    }
  }
  return Region(kind, geometry.block_bytes(), num_layers, num_blocks, std::move(memory));
}

Region::Region(RegionKind kind, int64_t block_bytes, int num_layers, int num_blocks,
               device::Buffer memory)
    : kind_(kind),
      block_bytes_(block_bytes),
      num_layers_(num_layers),
      num_blocks_(num_blocks),
      free_blocks_(num_blocks),
      memory_(std::move(memory)) {
  if (num_blocks > 0) free_extents_[0] = num_blocks;
}

int Region::Allocate(int previous) {
  if (free_extents_.empty()) return -1;
  if (previous >= 0) {
    if (const auto next = free_extents_.find(previous + 1); next != free_extents_.end()) {
      const int index = next->first;
      Take(next, index);
      return index;
    }
  }
  auto largest = free_extents_.begin();
  for (auto it = free_extents_.begin(); it != free_extents_.end(); ++it) {
    if (it->second > largest->second) largest = it;
  }
  // Whoever owns the block before the extent may be growing into it; starting in the middle leaves
  // both room to go on.
  const int index = largest->first == 0 ? 0 : largest->first + largest->second / 2;
  Take(largest, index);
  return index;
}

void Region::Take(std::map<int, int>::iterator extent, int index) {
  const auto [first, size] = *extent;
  free_extents_.erase(extent);
  if (index > first) free_extents_[first] = index - first;
  if (index + 1 < first + size) free_extents_[index + 1] = first + size - index - 1;
  --free_blocks_;
}

void Region::Free(int index) {
  CHECK(index >= 0 && index < num_blocks_) << "block " << index << " of " << num_blocks_;
  int first = index;
  int size = 1;
  auto after = free_extents_.upper_bound(index);
  if (after != free_extents_.begin()) {
    const auto before = std::prev(after);
    CHECK_LE(before->first + before->second, index) << "block freed twice";
    if (before->first + before->second == index) {
      first = before->first;
      size += before->second;
      free_extents_.erase(before);
    }
  }
  if (after != free_extents_.end() && after->first == index + 1) {
    size += after->second;
    free_extents_.erase(after);
  }
  free_extents_[first] = size;
  ++free_blocks_;
}

}  // namespace writescope::kvcache
