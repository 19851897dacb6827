// What a step attends to, and the state that its three parties share: the engine thread, the link
// pump and the CPU workers.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/attention/meet_cursor.h"
#include "engine/attention/run_list.h"
#include "engine/kvcache/inplace_kv_cache.h"
#include "engine/ops/ops.h"

namespace writescope::attention {

// Of one micro-batch. Reader i is its i-th sequence.
struct StepAttention {
  struct Open {
    int reader = 0;
    kvcache::OpenSpan span;
  };
  RunList runs;
  std::vector<ops::ReaderRows> rows;  // By reader
  std::vector<Open> open;
  int num_rows = 0;
  int first_row = 0;  // Of the whole step's rows, the one that is row 0 here
};

// A micro-batch is the whole batch of a step, or one of two parts of it that take turns: while the
// device does one part's dense work the CPU has the other's query. A *turn* is the attention of one
// micro-batch in one layer; turns come in the order of layers, and within a layer of micro-batches.
inline constexpr int kMaxMicroBatches = 2;

// A sequence's part of a micro-batch.
struct StepSequence {
  const kvcache::WritePlan* plan = nullptr;
  int first_row = 0;  // Of the whole step's
};

// Which side a test hook speaks of.
enum class Side { kCpu, kLink };

// For tests: called before a side claims work of a turn. Returning false stops that thread where
// it is, as if it had died.
using ClaimHook = std::function<bool(Side side, int turn)>;

// Reads the cache's views; the rows of `sequences` follow each other. With `retain_keep_free` >= 0,
// swing and stream blocks are given copies on the device while more than that many of its blocks
// are free; their ids are added to `retained`.
StepAttention BuildStepAttention(kvcache::InplaceKvCache& cache,
                                 std::span<const StepSequence> sequences, RunOrder order,
                                 int64_t retain_keep_free, std::vector<int>* retained);

// One turn's claims and flags. All members but the flags are reset by the engine thread before a
// step.
struct TurnProgress {
  MeetCursor swing;
  std::atomic<int64_t> host_claimed{0};
  std::atomic<int64_t> cpu_reported{0};    // Blocks whose partials are in the merge buffer
  std::atomic<int64_t> first_start_ns{0};  // Of the CPU's work with the query; 0: none yet
  std::atomic<int64_t> last_report_ns{0};
};

// Flags that the device and the CPU poll; page-locked memory. Each holds the epoch of the last step
// that got there, so they need no reset.
struct HandoffFlags {
  std::atomic<uint64_t> query_ready{0};
  std::atomic<uint64_t> cpu_done{0};
};

struct StepContext {
  std::span<const StepAttention> micro_batches;
  const kvcache::BlockTable* blocks = nullptr;
  int num_turns = 0;
  uint64_t epoch = 0;
  // Whether the CPU takes part. Otherwise host runs are streamed too.
  bool handoff = false;
  int num_workers = 1;            // That claim
  bool guided = false;            // meet: claims of the link shrink towards the end
  double cpu_share = 0.5;         // guided: what the CPU is thought to take
  int64_t cpu_reserve_bytes = 0;  // guided: the link leaves the last of a turn's swing list
  TurnProgress* turns = nullptr;  // [num_turns]
  HandoffFlags* flags = nullptr;  // [num_turns]
  std::atomic<bool> abort{false};
  ClaimHook hook;

  int num_micro_batches() const { return static_cast<int>(micro_batches.size()); }
  const StepAttention& attention(int turn) const {
    return micro_batches[static_cast<size_t>(turn % num_micro_batches())];
  }
  int layer(int turn) const { return turn / num_micro_batches(); }
  int64_t host_blocks(int turn) const {
    return handoff ? attention(turn).runs.host.num_blocks() : 0;
  }
  // Sets cpu_done of the turn once nothing is left to claim and every claim of the CPU has
  // reported.
  void SignalIfDone(int turn);
  bool AllClaimed(int turn) const;
};

}  // namespace writescope::attention
