// Pure: the sealed blocks that a step attends to, in schedule order, with their readers.
//
// Attention is over a set, so blocks need no order by position. There is one list for a step; it
// holds for every layer, since a block lies at the same index of each layer's plane. The spilled
// part is
//   stream runs | swing runs | host runs
// and the cut between GPU and CPU is one cursor in the swing list, so it splits at most one run.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/kvcache/block_table.h"

namespace writescope::attention {

// Blocks at consecutive indices of one region and consecutive positions, read by the same
// sequences: read once a step, by one side, for all of them.
struct Run {
  kvcache::RegionKind region = kvcache::RegionKind::kDevice;
  int first_index = 0;
  int num_blocks = 0;
  int64_t first_position = 0;
  int first_reader = 0;  // Range in RunList::readers
  int num_readers = 0;
  int retain_index =
      -1;  // The device block that keeps a copy of the first block; consecutive after it
};

// A sealed block of a sequence, and where it is read.
struct PlacedBlock {
  int block_id = 0;
  kvcache::BlockPlace place;
  int retain_index = -1;
};

// Runs one after another, found by block.
class RunQueue {
 public:
  void Add(const Run& run);
  const std::vector<Run>& runs() const { return runs_; }
  int64_t num_blocks() const {
    return starts_.empty() ? 0 : starts_.back() + runs_.back().num_blocks;
  }
  // The parts of runs that make up blocks [first, first + count) of the queue.
  void Slice(int64_t first, int64_t count, std::vector<Run>* parts) const;
  // The run that holds the block, which is one of the queue's, and the first block of a run.
  size_t RunAt(int64_t block) const;
  int64_t start(size_t run) const { return starts_[run]; }

 private:
  std::vector<Run> runs_;
  std::vector<int64_t> starts_;  // Of each run, in blocks
};

struct RunList {
  std::vector<Run> device;
  RunQueue stream;  // Streamed in any case, first of all the blocks that are to be retained
  RunQueue swing;
  RunQueue host;
  std::vector<int> readers;

  int64_t device_blocks() const;
  int64_t spilled_blocks() const {
    return stream.num_blocks() + swing.num_blocks() + host.num_blocks();
  }
};

// Of the swing list.
enum class RunOrder {
  kByReader,
  // Short runs stand at the CPU's end, for cuts that are planned: where sequences have outgrown
  // their place on the device each has a few blocks here, and the link would take a copy for each.
  kShortLast,
};

// sequences[i] are the sealed blocks of reader i, in order from position 0.
RunList BuildRunList(std::span<const std::vector<PlacedBlock>> sequences,
                     RunOrder order = RunOrder::kByReader);

// Blocks of the swing list that stay in front of the cut (streamed), for a CPU share of all spilled
// blocks; what the rigid runs do not allow is clamped.
int64_t CutForShare(const RunList& list, double cpu_share);

}  // namespace writescope::attention
