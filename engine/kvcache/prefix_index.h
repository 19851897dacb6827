// Sealed blocks by content, so that sequences with the same beginning share them.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_map>

#include "engine/base/tile_layout.h"
#include "engine/base/units.h"

namespace writescope::kvcache {

// A block's content is its 64 tokens and all tokens before: an entry holds its own tokens and the
// entry before it. Found means equal, token by token; a hash alone decides nothing.
// Engine thread.
class PrefixIndex {
 public:
  using EntryId = uint64_t;  // Never reused, so an entry whose parent is gone is merely not found.
  static constexpr EntryId kRoot = 0;
  static constexpr EntryId kNone = ~EntryId{0};

  struct Found {
    EntryId entry = kNone;
    int block_id = -1;
  };
  // The block that holds `tokens` (64 of them) after `parent`; entry kNone without one.
  Found Find(EntryId parent, std::span<const TokenId> tokens) const;
  // Adds a block; the entry that stands for this content, which is an older one if there was one
  // (`added` is then false, and the block stays out of the index).
  EntryId Add(EntryId parent, std::span<const TokenId> tokens, int block_id, bool* added);
  void Remove(EntryId entry);
  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    EntryId parent;
    int block_id;
    uint64_t hash;
    std::array<TokenId, kBlockTokens> tokens;
  };
  static uint64_t Hash(EntryId parent, std::span<const TokenId> tokens);

  std::unordered_map<EntryId, Entry> entries_;
  std::unordered_multimap<uint64_t, EntryId> by_hash_;
  EntryId next_entry_ = kRoot + 1;
};

}  // namespace writescope::kvcache
