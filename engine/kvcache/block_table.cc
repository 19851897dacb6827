#include "engine/kvcache/block_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/check.h"
#include "engine/base/crc32c.h"
#include "engine/base/status_macros.h"

namespace writescope::kvcache {
namespace {

size_t At(RegionKind kind) { return static_cast<size_t>(kind); }

}  // namespace

absl::StatusOr<BlockTable> BlockTable::Create(const Options& options, device::Device& device) {
  std::vector<Region> regions;
  for (const RegionKind kind : kAllRegions) {
    ASSIGN_OR_RETURN(Region region,
                     Region::Create(kind, options.geometry, options.num_layers,
                                    static_cast<int>(options.blocks[At(kind)]), device));
    regions.push_back(std::move(region));
  }
  return BlockTable(options, std::move(regions));
}

BlockTable::BlockTable(const Options& options, std::vector<Region> regions)
    : options_(options), regions_(std::move(regions)) {}

RegionFill BlockTable::Fill() const {
  RegionFill fill;
  for (const RegionKind kind : kAllRegions) {
    fill.capacity[At(kind)] = region(kind).num_blocks();
    fill.available[At(kind)] =
        region(kind).free_blocks() + static_cast<int64_t>(cached_[At(kind)].size());
  }
  if (!retained_locked_) {
    fill.available[At(RegionKind::kDevice)] += static_cast<int64_t>(retained_ids_.size());
  }
  return fill;
}

std::vector<RegionUsage> BlockTable::Usage() const {
  std::vector<RegionUsage> usage;
  for (const RegionKind kind : kAllRegions) {
    RegionUsage u{.region = kind};
    u.capacity = region(kind).num_blocks();
    u.free = region(kind).free_blocks();
    u.cached = static_cast<int64_t>(cached_[At(kind)].size());
    if (kind == RegionKind::kDevice) u.retained = static_cast<int64_t>(retained_ids_.size());
    u.used = u.capacity - u.free - u.cached - u.retained;
    usage.push_back(u);
  }
  return usage;
}

int BlockTable::Allocate(const PlacementRequest& request, int previous) {
  RegionKind kind;
  if (!ChooseRegion(request, Fill(), &kind) || !MakeRoom(kind)) return -1;
  const int hint = previous >= 0 && block(previous).region == kind ? block(previous).index : -1;
  Block fresh;
  fresh.region = kind;
  fresh.index = region_ref(kind).Allocate(hint);
  fresh.holders = 1;
  CHECK_GE(fresh.index, 0);
  int id;
  if (unused_ids_.empty()) {
    id = static_cast<int>(blocks_.size());
    blocks_.push_back(fresh);
  } else {
    id = unused_ids_.back();
    unused_ids_.pop_back();
    block(id) = fresh;
  }
  return id;
}

bool BlockTable::MakeRoom(RegionKind kind) {
  if (region(kind).free_blocks() > 0) return true;
  if (kind == RegionKind::kDevice && !retained_locked_ && !retained_ids_.empty()) {
    DropRetained(retained_ids_.back());
    return true;
  }
  if (cached_[At(kind)].empty()) return false;
  Destroy(cached_[At(kind)].front());
  return true;
}

void BlockTable::Hold(int id) {
  Block& b = block(id);
  if (b.cached) {
    cached_[At(b.region)].erase(b.in_list);
    b.cached = false;
  }
  ++b.holders;
}

void BlockTable::Release(int id) {
  Block& b = block(id);
  CHECK_GT(b.holders, 0) << "block " << id;
  if (--b.holders > 0) return;
  if (b.entry == PrefixIndex::kNone) {
    Destroy(id);
    return;
  }
  b.cached = true;
  b.in_list = cached_[At(b.region)].insert(cached_[At(b.region)].end(), id);
}

void BlockTable::Destroy(int id) {
  Block& b = block(id);
  CHECK_EQ(b.holders, 0) << "block " << id;
  if (b.cached) cached_[At(b.region)].erase(b.in_list);
  if (b.entry != PrefixIndex::kNone) prefixes_.Remove(b.entry);
  if (b.retained_index >= 0) DropRetained(id);
  region_ref(b.region).Free(b.index);
  b = Block();
  unused_ids_.push_back(id);
}

void BlockTable::CountWrite(int id, int layer) {
  Block& b = block(id);
  if (layer < b.written_layers) moved_bytes_ += options_.geometry.block_bytes();
  b.written_layers = std::max(b.written_layers, layer + 1);
}

void BlockTable::Seal(int id) {
  Block& b = block(id);
  CHECK_EQ(b.written_layers, options_.num_layers) << "block " << id;
  b.sealed = true;
  if (options_.verify) b.crc = ComputeCrc({b.region, b.index});
}

uint32_t BlockTable::ComputeCrc(const BlockPlace& place) const {
  const Region& r = region(place.region);
  uint32_t crc = 0;
  for (int layer = 0; layer < options_.num_layers; ++layer) {
    crc = Crc32c({r.Address(layer, place.index), static_cast<size_t>(r.block_bytes())}, crc);
  }
  return crc;
}

absl::Status BlockTable::Verify(int id) const {
  if (!options_.verify) return absl::OkStatus();
  const BlockPlace place = read_place(id);
  const uint32_t crc = ComputeCrc(place);
  if (crc == block(id).crc) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("block ", place.index, " of region ",
                                          std::string(RegionName(place.region)),
                                          " changed after it was sealed: CRC ", absl::Hex(crc),
                                          ", sealed as ", absl::Hex(block(id).crc)));
}

BlockPlace BlockTable::read_place(int id) const {
  const Block& b = block(id);
  if (b.retained) return {RegionKind::kDevice, b.retained_index};
  return {b.region, b.index};
}

PrefixIndex::EntryId BlockTable::Index(int id, PrefixIndex::EntryId parent,
                                       std::span<const TokenId> tokens) {
  Block& b = block(id);
  CHECK(b.sealed) << "block " << id;
  bool added = false;
  const PrefixIndex::EntryId entry = prefixes_.Add(parent, tokens, id, &added);
  if (added) b.entry = entry;
  return entry;
}

int BlockTable::BeginRetain(int id, int64_t keep_free) {
  Block& b = block(id);
  CHECK(IsSpilled(b.region)) << "block " << id;
  if (b.retained_index >= 0) return -1;
  Region& vram = region_ref(RegionKind::kDevice);
  if (vram.free_blocks() <= keep_free) return -1;
  b.retained_index = vram.Allocate(last_retained_index_);
  last_retained_index_ = b.retained_index;
  retained_ids_.push_back(id);
  return b.retained_index;
}

void BlockTable::FinishRetain(int id, bool landed) {
  if (landed) {
    block(id).retained = true;
  } else {
    DropRetained(id);
  }
}

void BlockTable::DropRetained(int id) {
  Block& b = block(id);
  region_ref(RegionKind::kDevice).Free(b.retained_index);
  b.retained_index = -1;
  b.retained = false;
  retained_ids_.erase(std::find(retained_ids_.begin(), retained_ids_.end(), id));
}

}  // namespace writescope::kvcache
