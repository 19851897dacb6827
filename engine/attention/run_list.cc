#include "engine/attention/run_list.h"

#include <algorithm>
#include <cmath>

#include "absl/container/flat_hash_map.h"

namespace writescope::attention {
namespace {

using kvcache::RegionKind;

// A block of the step and who reads it. A long context has thousands, with one reader each as a
// rule, and no token is computed before the list is there: nothing is allocated for a block alone.
struct SharedBlock {
  PlacedBlock placed;
  int64_t position = 0;
  int first_reader = 0;
  std::vector<int> others;  // Readers after the first

  bool HasReadersOf(const SharedBlock& other) const {
    return first_reader == other.first_reader && others == other.others;
  }
};

std::vector<SharedBlock> CollectBlocks(std::span<const std::vector<PlacedBlock>> sequences) {
  size_t num_blocks = 0;
  int max_id = -1;
  for (const std::vector<PlacedBlock>& sequence : sequences) {
    num_blocks += sequence.size();
    for (const PlacedBlock& placed : sequence) max_id = std::max(max_id, placed.block_id);
  }
  std::vector<SharedBlock> blocks;
  blocks.reserve(num_blocks);
  std::vector<int> by_id(static_cast<size_t>(max_id + 1), -1);
  for (size_t r = 0; r < sequences.size(); ++r) {
    const int reader = static_cast<int>(r);
    for (size_t unit = 0; unit < sequences[r].size(); ++unit) {
      const PlacedBlock& placed = sequences[r][unit];
      int& at = by_id[static_cast<size_t>(placed.block_id)];
      if (at < 0) {
        at = static_cast<int>(blocks.size());
        blocks.push_back({.placed = placed,
                          .position = static_cast<int64_t>(unit) * kBlockTokens,
                          .first_reader = reader});
      } else {
        blocks[static_cast<size_t>(at)].others.push_back(reader);
      }
    }
  }
  return blocks;
}

bool Continues(const Run& run, const SharedBlock& first, const SharedBlock& next) {
  const int n = run.num_blocks;
  return next.placed.place.region == run.region && next.placed.place.index == run.first_index + n &&
         next.position == run.first_position + static_cast<int64_t>(n) * kBlockTokens &&
         next.placed.retain_index == (run.retain_index < 0 ? -1 : run.retain_index + n) &&
         next.HasReadersOf(first);
}

// A copy of fewer blocks takes the link longer than its bytes do.
constexpr int kShortRunBlocks = 16;

// Long runs as they come, then the short ones as they lie: neighbours that do cross the link can do
// so in one copy. But where a sequence has many short ones they stay together: in a full cache
// sequences grow block by block in turns, and a worker would begin with another one at each block.
void PutShortLast(const std::vector<int>& readers, std::vector<Run>& runs) {
  const auto first_short = std::stable_partition(
      runs.begin(), runs.end(), [](const Run& run) { return run.num_blocks >= kShortRunBlocks; });
  const auto reader_of = [&](const Run& run) {
    return readers[static_cast<size_t>(run.first_reader)];
  };
  absl::flat_hash_map<int, int64_t> short_blocks;
  for (auto run = first_short; run != runs.end(); ++run) {
    short_blocks[reader_of(*run)] += run->num_blocks;
  }
  const auto first_few = std::stable_partition(first_short, runs.end(), [&](const Run& run) {
    return short_blocks[reader_of(run)] >= kShortRunBlocks;
  });
  std::sort(first_few, runs.end(),
            [](const Run& a, const Run& b) { return a.first_index < b.first_index; });
}

void AddRun(const Run& run, RunList* list, std::vector<Run>* swing) {
  switch (run.region) {
    case RegionKind::kDevice:
      list->device.push_back(run);
      break;
    case RegionKind::kStream:
      list->stream.Add(run);
      break;
    case RegionKind::kSwing:
      // A block that will be kept on the device has to cross the link, whatever the cut.
      if (run.retain_index >= 0) {
        list->stream.Add(run);
      } else {
        swing->push_back(run);
      }
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

size_t RunQueue::RunAt(int64_t block) const {
  return static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), block) -
                             starts_.begin()) -
         1;
}

void RunQueue::Slice(int64_t first, int64_t count, std::vector<Run>* parts) const {
  if (count <= 0) return;
  for (size_t i = RunAt(first); count > 0; ++i) {
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

RunList BuildRunList(std::span<const std::vector<PlacedBlock>> sequences, RunOrder order) {
  RunList list;
  std::vector<Run> swing;
  const std::vector<SharedBlock> blocks = CollectBlocks(sequences);
  for (size_t i = 0; i < blocks.size();) {
    const SharedBlock& first = blocks[i];
    Run run{.region = first.placed.place.region,
            .first_index = first.placed.place.index,
            .num_blocks = 1,
            .first_position = first.position,
            .first_reader = static_cast<int>(list.readers.size()),
            .num_readers = 1 + static_cast<int>(first.others.size()),
            .retain_index = first.placed.retain_index};
    for (++i; i < blocks.size() && Continues(run, first, blocks[i]); ++i) ++run.num_blocks;
    list.readers.push_back(first.first_reader);
    list.readers.insert(list.readers.end(), first.others.begin(), first.others.end());
    AddRun(run, &list, &swing);
  }
  if (order == RunOrder::kShortLast) PutShortLast(list.readers, swing);
  for (const Run& run : swing) list.swing.Add(run);
  return list;
}

int64_t CutForShare(const RunList& list, double cpu_share) {
  const double cpu_blocks = cpu_share * static_cast<double>(list.spilled_blocks()) -
                            static_cast<double>(list.host.num_blocks());
  const int64_t back = std::clamp<int64_t>(std::llround(cpu_blocks), 0, list.swing.num_blocks());
  return list.swing.num_blocks() - back;
}

}  // namespace writescope::attention
