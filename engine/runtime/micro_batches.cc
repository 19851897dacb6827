#include "engine/runtime/micro_batches.h"

#include <algorithm>
#include <map>
#include <utility>

namespace writescope::runtime {
namespace {

struct Group {
  std::vector<int> members;
  int64_t spilled_bytes = 0;  // As if nothing were shared: which part is the larger is all it tells
};

std::vector<Group> GroupByBeginning(std::span<const SequenceLoad> sequences) {
  std::vector<Group> groups;
  std::map<int, size_t> by_block;
  for (size_t i = 0; i < sequences.size(); ++i) {
    size_t at = groups.size();
    if (sequences[i].first_block >= 0) {
      at = by_block.try_emplace(sequences[i].first_block, at).first->second;
    }
    if (at == groups.size()) groups.emplace_back();
    groups[at].members.push_back(static_cast<int>(i));
    groups[at].spilled_bytes += sequences[i].spilled_bytes;
  }
  return groups;
}

}  // namespace

MicroBatches SplitInTwo(std::span<const SequenceLoad> sequences) {
  const size_t most = (sequences.size() + 1) / 2;
  MicroBatches parts(sequences.size() < 2 ? 1 : 2);
  std::vector<int64_t> part_bytes(parts.size());
  std::vector<Group> groups = GroupByBeginning(sequences);
  // The largest first, each to the part that has less.
  std::stable_sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) {
    return a.spilled_bytes > b.spilled_bytes;
  });
  const auto add = [&](size_t part, int member) {
    parts[part].push_back(member);
    part_bytes[part] += sequences[static_cast<size_t>(member)].spilled_bytes;
  };
  for (const Group& group : groups) {
    size_t part = parts.size() == 2 && part_bytes[1] < part_bytes[0] ? 1 : 0;
    const auto fits = [&](size_t p, size_t count) { return parts[p].size() + count <= most; };
    if (parts.size() == 2 && !fits(part, group.members.size()) &&
        fits(1 - part, group.members.size())) {
      part = 1 - part;
    }
    for (const int member : group.members) add(fits(part, 1) ? part : 1 - part, member);
  }
  for (std::vector<int>& part : parts) std::sort(part.begin(), part.end());
  // Of an odd batch the first part is the larger: what is kept by the parts' sizes is kept once.
  if (parts.back().size() > parts.front().size()) std::swap(parts.front(), parts.back());
  return parts;
}

}  // namespace writescope::runtime
