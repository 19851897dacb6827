// InplaceKVCache: where every KV byte lives, from its write to its end.
//
// New tokens go to an open tail in device memory: two units of 64 tokens for each sequence. A full
// unit is committed once, in one copy, to its home, which is chosen then; sealed bytes never change
// or move. Until the commit has landed, readers use the tail. In a long prompt chunk the units that
// will be full by its end skip the tail: those with a home on the device are written there, the
// others to a workspace of two layers from which they are committed while later layers run.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/base/tile_layout.h"
#include "engine/base/units.h"
#include "engine/device/device.h"
#include "engine/kvcache/block_table.h"

namespace writescope::kvcache {

// Memory that has an address for each layer; after `period` layers the addresses start over.
struct LayeredAddress {
  std::byte* base = nullptr;
  int64_t stride_bytes = 0;
  int period = 1;
  std::byte* At(int layer) const { return base + (layer % period) * stride_bytes; }
};

// The part of a step's writes that falls into one unit.
struct UnitWrite {
  int64_t unit = 0;    // Position / 64
  int first_slot = 0;  // Slots [first_slot, first_slot + num_slots) are written
  int num_slots = 0;
  LayeredAddress target;  // Of the unit's block
  int block_id = -1;      // Home; -1 while the unit stays open
  bool in_home = false;   // `target` is the home itself: nothing to commit
  int tail_half = -1;     // `target` is this half of the tail; a commit is made after the step
};
struct WritePlan {
  int slot = -1;
  int64_t first_position = 0;
  int num_tokens = 0;
  std::vector<UnitWrite> units;
  int open_half = 0;  // The sequence's, once the plan is carried out
};

// Memory that a sequence's attention reads besides sealed blocks: consecutive tokens of one unit.
struct OpenSpan {
  LayeredAddress address;
  int64_t first_position = 0;
  int num_tokens = 0;
};
// What a sequence attends to. Unit u of `block_ids` holds positions [64u, 64u + 64).
struct SequenceView {
  std::span<const int> block_ids;  // Sealed blocks, from the start
  std::vector<OpenSpan> open;      // What follows them
};

// Bytes that lie in each region for one sequence.
struct SequencePlacement {
  std::array<int64_t, kNumRegions> bytes{};
};

// Engine thread.
class InplaceKvCache {
 public:
  struct Options {
    KvGeometry geometry;
    int num_layers = 0;
    int max_sequences = 0;
    std::array<int64_t, kNumRegions> blocks{};  // By region
    int workspace_units = 0;                    // Full units that one step may write
    bool prefix_cache = true;
    bool retention = true;
    bool verify = false;
    int64_t host_after_spilled_blocks = 0;  // See PlacementRequest
    absl::Duration wait_limit = absl::Seconds(2);
  };
  // Device memory besides the device region.
  static int64_t TailBytes(const Options& options);
  static int64_t WorkspaceBytes(const Options& options);
  static int64_t FixedDeviceBytes(const Options& options) {
    return TailBytes(options) + WorkspaceBytes(options);
  }
  static absl::StatusOr<std::unique_ptr<InplaceKvCache>> Create(const Options& options,
                                                                device::Device& device);
  // Waits for copies under way: they read and write this memory.
  ~InplaceKvCache();

  const BlockTable& blocks() const { return blocks_; }
  BlockTable& mutable_blocks() { return blocks_; }
  const Options& options() const { return options_; }
  int64_t bytes_per_token() const;
  // Blocks that a new sequence could get besides what running ones have been promised.
  int64_t UnpromisedBlocks() const;

  // Blocks that are free or would be by evicting what no sequence holds.
  int64_t FreeBlocks() const;
  // Of the blocks that MatchPrefix would find, those that running sequences hold anyway.
  int64_t HeldPrefixBlocks(std::span<const TokenId> tokens, int64_t max_tokens) const;

  // Opens a sequence that will hold `expected_blocks` blocks: its slot, or -1 when all are taken.
  int AddSequence(int64_t expected_blocks);
  // Gives a new sequence the sealed blocks that hold the beginning of `tokens`, at most
  // `max_tokens` of them. The number of tokens found, a multiple of 64.
  int64_t MatchPrefix(int slot, std::span<const TokenId> tokens, int64_t max_tokens);
  // Of the tokens found, those whose blocks lie on the device.
  int64_t DeviceTokens(int slot) const;
  // Gives up all blocks and the slot. Commits under way are waited for.
  void RemoveSequence(int slot);
  int64_t length(int slot) const { return sequence(slot).length; }
  SequencePlacement Placement(int slot) const;
  // Blocks of the sequence's full units; the last ones may still be on their way home.
  std::span<const int> SealedBlocks(int slot) const { return sequence(slot).block_ids; }

  // Where the next tokens go. `workspace_used` counts the step's workspace units over its
  // sequences. RESOURCE_EXHAUSTED when a block cannot be had: nothing has changed then.
  absl::StatusOr<WritePlan> PrepareWrite(int slot, int num_tokens, int* workspace_used);
  // After the layer's writes have been submitted to the compute queue, for every layer written:
  // commits what left the tail out.
  void CommitLayer(const WritePlan& plan, int layer);
  // Before a layer writes to the workspace: waits on the compute queue for the commits of the layer
  // that used it before.
  void AwaitWorkspace(int layer);
  // After all layers: the tokens are in, tails that are full are committed.
  void FinishWrite(const WritePlan& plan, std::span<const TokenId> tokens);
  // Instead, when the step failed: the sequence is as before.
  void AbandonWrite(const WritePlan& plan);
  // Takes note of commits that have landed.
  void NoteCommits(int slot);
  // The same when all of the sequence's have; waits for them. DEADLINE_EXCEEDED after fifteen times
  // the wait limit.
  absl::Status AwaitCommits(int slot);

  // What the sequence's queries of `plan` attend to, the tokens of the plan included.
  SequenceView View(int slot, const WritePlan& plan) const;

  int64_t committed_bytes() const { return committed_bytes_; }

 private:
  // A unit on its way to its home.
  struct PendingCommit {
    int64_t unit = 0;
    int block_id = -1;
    int tail_half = -1;  // Where it is until then; -1: not in the tail
    device::Event landed;
  };
  struct Sequence {
    bool in_use = false;
    int64_t length = 0;
    int64_t expected_blocks = 0;
    DeviceQuota device_quota;
    int64_t device_blocks = 0;
    std::vector<int> block_ids;  // Of full units, in order; the last may be pending
    std::vector<PendingCommit> pending;
    int open_half = 0;                  // Of the tail: holds the open unit
    bool half_dirty[2] = {true, true};  // Holds what is no longer needed: zero it before use
    int layers_written = 0;             // Of the plan under way
    std::vector<TokenId> tokens;
    int64_t indexed_units = 0;
    PrefixIndex::EntryId last_entry = PrefixIndex::kRoot;
  };

  InplaceKvCache(const Options& options, device::Device& device, BlockTable blocks,
                 device::Buffer tails, device::Buffer workspace);
  Sequence& sequence(int slot) { return sequences_[static_cast<size_t>(slot)]; }
  const Sequence& sequence(int slot) const { return sequences_[static_cast<size_t>(slot)]; }
  LayeredAddress TailAddress(int slot, int half) const;
  LayeredAddress WorkspaceAddress(int index) const;
  LayeredAddress HomeAddress(int block_id) const;
  int AllocateBlock(Sequence& s);
  void UndoBlocks(Sequence& s, const WritePlan& plan);
  absl::StatusOr<UnitWrite> PlanUnit(int slot, int64_t position, int64_t end, WritePlan* plan,
                                     int* workspace_used);
  absl::Status ClearTailHalf(int slot, int half);
  // Zeroes slots [first_slot, 64) of a tail half.
  void ZeroTailFrom(int slot, int half, int first_slot, int num_layers);
  // The only function that writes a sealed block's home from elsewhere.
  void CopyToHome(int block_id, int layer, const std::byte* from);
  void IndexSealed(Sequence& s);

  const Options options_;
  device::Device& device_;
  BlockTable blocks_;
  device::Buffer tails_;      // [max_sequences][2 halves][num_layers] blocks
  device::Buffer workspace_;  // [2][workspace_units] blocks
  std::vector<Sequence> sequences_;
  device::Event workspace_free_[2];  // By layer parity: the last commit that read it
  int64_t committed_bytes_ = 0;
};

}  // namespace writescope::kvcache
