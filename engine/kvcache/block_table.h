// Every block of the cache: where its home is, who holds it, and what may be done with it. Regions,
// reference counts, prefix entries, eviction and retention meet here.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/kvcache/placement_plan.h"
#include "engine/kvcache/prefix_index.h"
#include "engine/kvcache/region.h"

namespace writescope::kvcache {

struct BlockPlace {
  RegionKind region = RegionKind::kDevice;
  int index = -1;
};

// Blocks by region, for metrics and the ledger. free + used + cached + retained = capacity.
struct RegionUsage {
  RegionKind region;
  int64_t capacity = 0;
  int64_t free = 0;
  int64_t used = 0;      // Held by sequences
  int64_t cached = 0;    // Held by none, kept for later sequences with the same prefix
  int64_t retained = 0;  // Device only: copies of blocks whose home is elsewhere
};

// Engine thread.
class BlockTable {
 public:
  struct Options {
    KvGeometry geometry;
    int num_layers = 0;
    std::array<int64_t, kNumRegions> blocks{};
    bool verify = false;  // Keep a CRC of every sealed block
  };
  static absl::StatusOr<BlockTable> Create(const Options& options, device::Device& device);

  const Region& region(RegionKind kind) const { return regions_[static_cast<size_t>(kind)]; }
  int num_layers() const { return options_.num_layers; }
  const KvGeometry& geometry() const { return options_.geometry; }
  RegionFill Fill() const;
  std::vector<RegionUsage> Usage() const;

  // A new block with one holder, not valid yet. `previous` is the id of the sequence's last block
  // or -1. -1 when nothing is free even after dropping retained copies and evicting cached blocks.
  int Allocate(const PlacementRequest& request, int previous);
  // One more holder.
  void Hold(int id);
  // One holder less. With none left a block in the prefix index is cached, another is freed.
  void Release(int id);

  // The only way by which bytes of a block are written: says that `layer` of it now is, and counts
  // the bytes as moved when it was before.
  void CountWrite(int id, int layer);
  // All layers are written and may be read from now on.
  void Seal(int id);
  bool sealed(int id) const { return block(id).sealed; }
  BlockPlace home(int id) const { return {block(id).region, block(id).index}; }
  // Where to read a sealed block: the retained copy, or its home.
  BlockPlace read_place(int id) const;
  int holders(int id) const { return block(id).holders; }
  // DATA_LOSS when a sealed block's bytes differ from what they were. Only with `verify`.
  absl::Status Verify(int id) const;

  PrefixIndex::Found FindPrefix(PrefixIndex::EntryId parent,
                                std::span<const TokenId> tokens) const {
    return prefixes_.Find(parent, tokens);
  }
  // Makes a sealed block findable; the entry that stands for its content.
  PrefixIndex::EntryId Index(int id, PrefixIndex::EntryId parent, std::span<const TokenId> tokens);

  // A free device block to keep a copy of block `id` in; -1 without room above `keep_free`, or when
  // a copy is on its way already. It is read once FinishRetain says that the copy has landed;
  // without that it is given back.
  int BeginRetain(int id, int64_t keep_free);
  void FinishRetain(int id, bool landed);
  // While locked no retained copy is dropped: a step is reading them.
  void LockRetained(bool locked) { retained_locked_ = locked; }

  int64_t moved_bytes() const { return moved_bytes_; }

 private:
  struct Block {
    RegionKind region = RegionKind::kDevice;
    int index = -1;
    int holders = 0;
    bool sealed = false;
    int written_layers = 0;
    PrefixIndex::EntryId entry = PrefixIndex::kNone;
    int retained_index = -1;
    bool retained = false;  // The copy has landed.
    uint32_t crc = 0;
    std::list<int>::iterator in_list;  // In cached_[region] while cached
    bool cached = false;
  };

  BlockTable(const Options& options, std::vector<Region> regions);
  Block& block(int id) { return blocks_[static_cast<size_t>(id)]; }
  const Block& block(int id) const { return blocks_[static_cast<size_t>(id)]; }
  Region& region_ref(RegionKind kind) { return regions_[static_cast<size_t>(kind)]; }
  // Makes one block of the region free if it can.
  bool MakeRoom(RegionKind kind);
  void Destroy(int id);
  void DropRetained(int id);
  uint32_t ComputeCrc(const BlockPlace& place) const;

  Options options_;
  std::vector<Region> regions_;
  std::vector<Block> blocks_;
  std::vector<int> unused_ids_;
  PrefixIndex prefixes_;
  std::array<std::list<int>, kNumRegions> cached_;  // Oldest first
  std::vector<int> retained_ids_;
  bool retained_locked_ = false;
  int last_retained_index_ = -1;  // Where the next copy would extend a run
  int64_t moved_bytes_ = 0;
};

}  // namespace writescope::kvcache
