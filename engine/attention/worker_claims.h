// Which worker attends to which blocks of a turn: claims from the lists that a step has, and of
// these claims what a worker hands on to another.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "engine/attention/claimed_blocks.h"
#include "engine/attention/step_attention.h"
#include "engine/base/tile_layout.h"

namespace writescope::attention {

inline std::span<const int> ReadersOf(const RunList& runs, const Run& run) {
  return std::span(runs.readers)
      .subspan(static_cast<size_t>(run.first_reader), static_cast<size_t>(run.num_readers));
}

// Where to cut a queue of these runs, at `block` or up to `slack` blocks from there: where other
// readers begin, as a rule those of the next sequence, if they do so near enough.
int64_t CutNear(const RunList& runs, const RunQueue& queue, int64_t block, int64_t slack);

// Thread-safe, each worker for itself. Blocks of a turn are numbered through the swing list and
// then the host list.
class WorkerClaims {
 public:
  using Range = ClaimedBlocks::Range;

  // While much of a layer is left a claim is this large: a worker then meets fewer sequences, each
  // of which it has to start and to merge. (128 sequences of 8K in one run: 784 and 748 ms a step
  // with 4 and 8 MiB, 828 with 2; in another 734, 739 and 757.)
  static constexpr int64_t kMaxClaimBytes = int64_t{8} << 20;

  WorkerClaims(const KvGeometry& geometry, int num_workers);

  // Engine thread, before the workers of a step start.
  void Clear();

  // Claims some for the worker, which has begun with all that it had; false when all are claimed.
  bool Claim(int worker, StepContext& step, int turn);
  // Takes some for the worker, which has begun with all that it had, of what another has claimed
  // and not begun with. Few only where the worker has begun already with their readers, and else
  // as many as are worth a start. `parts` is scratch.
  bool TakeFromOther(int worker, const StepContext& step, int turn,
                     absl::FunctionRef<bool(const Run&)> has_begun, std::vector<Run>* parts);
  bool HasOther(int worker, const StepContext& step, int turn) const;
  // What the worker is to begin with now, of its own.
  Range Begin(int worker, int turn);
  // What it has beside.
  Range left(int worker, int turn) const {
    return claimed_[static_cast<size_t>(worker)].left(turn);
  }

  // Whether so much is unclaimed that a worker may claim before it has to: the workers still end
  // together.
  bool HasPlenty(const StepContext& step, int turn) const;
  // Whether a worker that has so much left is not among the last to end.
  bool IsMuch(Range left) const { return left.count > least_taken_; }

  static void Slice(const StepContext& step, int turn, Range range, std::vector<Run>* parts);

 private:
  // Claims shrink towards the end of a layer.
  int64_t Wanted(const StepContext& step, int64_t left, int64_t num_blocks) const;

  // In blocks
  const int64_t least_claim_;
  const int64_t least_of_large_layer_;
  const int64_t most_claim_;
  const int64_t most_begun_;            // At a time
  const int64_t least_taken_;           // From another, to begin with a sequence
  std::vector<ClaimedBlocks> claimed_;  // By worker
};

}  // namespace writescope::attention
