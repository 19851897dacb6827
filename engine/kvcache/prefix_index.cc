#include "engine/kvcache/prefix_index.h"

#include <algorithm>

#include "absl/hash/hash.h"
#include "absl/types/span.h"
#include "engine/base/check.h"

namespace writescope::kvcache {

uint64_t PrefixIndex::Hash(EntryId parent, std::span<const TokenId> tokens) {
  return absl::HashOf(parent, absl::MakeConstSpan(tokens.data(), tokens.size()));
}

PrefixIndex::Found PrefixIndex::Find(EntryId parent, std::span<const TokenId> tokens) const {
  CHECK_EQ(tokens.size(), size_t{kBlockTokens});
  const auto [first, last] = by_hash_.equal_range(Hash(parent, tokens));
  for (auto it = first; it != last; ++it) {
    const Entry& entry = entries_.at(it->second);
    if (entry.parent == parent && std::equal(tokens.begin(), tokens.end(), entry.tokens.begin())) {
      return {it->second, entry.block_id};
    }
  }
  return {};
}

PrefixIndex::EntryId PrefixIndex::Add(EntryId parent, std::span<const TokenId> tokens, int block_id,
                                      bool* added) {
  if (const Found found = Find(parent, tokens); found.entry != kNone) {
    *added = false;
    return found.entry;
  }
  Entry entry{parent, block_id, Hash(parent, tokens), {}};
  std::copy(tokens.begin(), tokens.end(), entry.tokens.begin());
  const EntryId id = next_entry_++;
  by_hash_.emplace(entry.hash, id);
  entries_.emplace(id, entry);
  *added = true;
  return id;
}

void PrefixIndex::Remove(EntryId id) {
  const auto found = entries_.find(id);
  CHECK(found != entries_.end()) << "prefix entry " << id;
  const auto [first, last] = by_hash_.equal_range(found->second.hash);
  for (auto it = first; it != last; ++it) {
    if (it->second == id) {
      by_hash_.erase(it);
      break;
    }
  }
  entries_.erase(found);
}

}  // namespace writescope::kvcache
