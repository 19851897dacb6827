#include "engine/attention/step_attention.h"

#include "absl/container/flat_hash_map.h"

namespace writescope::attention {

using kvcache::RegionKind;

StepAttention BuildStepAttention(kvcache::InplaceKvCache& cache,
                                 std::span<const StepSequence> sequences, RunOrder order,
                                 int64_t retain_keep_free, std::vector<int>* retained) {
  StepAttention step;
  if (!sequences.empty()) step.first_row = sequences.front().first_row;
  std::vector<std::vector<PlacedBlock>> placed(sequences.size());
  kvcache::BlockTable& blocks = cache.mutable_blocks();
  absl::flat_hash_map<int, int> retain_index;
  for (size_t reader = 0; reader < sequences.size(); ++reader) {
    const kvcache::WritePlan& plan = *sequences[reader].plan;
    const kvcache::SequenceView view = cache.View(plan.slot, plan);
    placed[reader].reserve(view.block_ids.size());
    for (const int id : view.block_ids) {
      PlacedBlock block{.block_id = id, .place = blocks.read_place(id), .retain_index = -1};
      const bool may_retain =
          block.place.region == RegionKind::kSwing || block.place.region == RegionKind::kStream;
      if (may_retain && retain_keep_free >= 0) {
        const auto [it, is_new] = retain_index.try_emplace(id, -1);
        if (is_new) {
          it->second = blocks.BeginRetain(id, retain_keep_free);
          if (it->second >= 0) retained->push_back(id);
        }
        block.retain_index = it->second;
      }
      placed[reader].push_back(block);
    }
    for (const kvcache::OpenSpan& span : view.open) {
      step.open.push_back({static_cast<int>(reader), span});
    }
    step.rows.push_back({.first_row = sequences[reader].first_row - step.first_row,
                         .num_rows = plan.num_tokens,
                         .first_position = plan.first_position});
    step.num_rows += plan.num_tokens;
  }
  step.runs = BuildRunList(placed, order);
  return step;
}

bool StepContext::AllClaimed(int turn) const {
  const TurnProgress& progress = turns[turn];
  return progress.host_claimed.load(std::memory_order_seq_cst) >= host_blocks(turn) &&
         progress.swing.exhausted();
}

void StepContext::SignalIfDone(int turn) {
  if (!AllClaimed(turn)) return;
  // Claims are final from here on, so the two counts can be compared. Whoever claims last and
  // whoever reports last may both be here; sequential consistency makes at least one of them see
  // both counts complete.
  const TurnProgress& progress = turns[turn];
  const int64_t claimed = host_blocks(turn) + progress.swing.back();
  if (progress.cpu_reported.load(std::memory_order_seq_cst) == claimed) {
    flags[turn].cpu_done.store(epoch, std::memory_order_release);
  }
}

}  // namespace writescope::attention
