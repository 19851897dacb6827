#include "engine/attention/run_list.h"

#include <algorithm>
#include <cmath>

#include "absl/container/flat_hash_map.h"

namespace writescope::attention {
namespace {

using kvcache::RegionKind;

// A block of the step and who reads it.
struct SharedBlock {
  PlacedBlock placed;
  int64_t position = 0;
  std::vector<int> readers;
};

std::vector<SharedBlock> CollectBlocks(std::span<const std::vector<PlacedBlock>> sequences) {
  std::vector<SharedBlock> blocks;
  absl::flat_hash_map<int, size_t> by_id;
  for (size_t reader = 0; reader < sequences.size(); ++reader) {
    for (size_t unit = 0; unit < sequences[reader].size(); ++unit) {
      const PlacedBlock& placed = sequences[reader][unit];
      const auto [it, is_new] = by_id.try_emplace(placed.block_id, blocks.size());
      if (is_new) {
        blocks.push_back({placed, static_cast<int64_t>(unit) * kBlockTokens, {}});
      }
      blocks[it->second].readers.push_back(static_cast<int>(reader));
    }
  }
  return blocks;
}

bool Continues(const Run& run, const SharedBlock& first, const SharedBlock& next) {
  const int n = run.num_blocks;
  return next.placed.place.region == run.region && next.placed.place.index == run.first_index + n &&
         next.position == run.first_position + static_cast<int64_t>(n) * kBlockTokens &&
         next.placed.retain_index == (run.retain_index < 0 ? -1 : run.retain_index + n) &&
         next.readers == first.readers;
}

void AddRun(const Run& run, RunList* list) {
  switch (run.region) {
    case RegionKind::kDevice:
      list->device.push_back(run);
      break;
    case RegionKind::kStream:
      list->stream.Add(run);
      break;
    case RegionKind::kSwing:
      // A block that will be kept on the device has to cross the link, whatever the cut.
      (run.retain_index >= 0 ? list->stream : list->swing).Add(run);
      break;
    case RegionKind::kHost:
      list->host.Add(run);
      break;
  }
}

}  // namespace

void RunQueue::Add(const Run& run) {
  starts_.push_back(num_blocks());
  runs_.push_back(run);
}

void RunQueue::Slice(int64_t first, int64_t count, std::vector<Run>* parts) const {
  if (count <= 0) return;
  size_t i = static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), first) -
                                 starts_.begin()) -
             1;
  for (; count > 0; ++i) {
    Run part = runs_[i];
    const int skip = static_cast<int>(first - starts_[i]);
    const int take = static_cast<int>(std::min<int64_t>(part.num_blocks - skip, count));
    part.first_index += skip;
    part.first_position += static_cast<int64_t>(skip) * kBlockTokens;
    if (part.retain_index >= 0) part.retain_index += skip;
    part.num_blocks = take;
    parts->push_back(part);
    first += take;
    count -= take;
  }
}

int64_t RunList::device_blocks() const {
  int64_t blocks = 0;
  for (const Run& run : device) blocks += run.num_blocks;
  return blocks;
}

RunList BuildRunList(std::span<const std::vector<PlacedBlock>> sequences) {
  RunList list;
  const std::vector<SharedBlock> blocks = CollectBlocks(sequences);
  for (size_t i = 0; i < blocks.size();) {
    const SharedBlock& first = blocks[i];
    Run run{.region = first.placed.place.region,
            .first_index = first.placed.place.index,
            .num_blocks = 1,
            .first_position = first.position,
            .first_reader = static_cast<int>(list.readers.size()),
            .num_readers = static_cast<int>(first.readers.size()),
            .retain_index = first.placed.retain_index};
    for (++i; i < blocks.size() && Continues(run, first, blocks[i]); ++i) ++run.num_blocks;
    list.readers.insert(list.readers.end(), first.readers.begin(), first.readers.end());
    AddRun(run, &list);
  }
  return list;
}

int64_t CutForShare(const RunList& list, double cpu_share) {
  const double cpu_blocks = cpu_share * static_cast<double>(list.spilled_blocks()) -
                            static_cast<double>(list.host.num_blocks());
  const int64_t back = std::clamp<int64_t>(std::llround(cpu_blocks), 0, list.swing.num_blocks());
  return list.swing.num_blocks() - back;
}

}  // namespace writescope::attention
