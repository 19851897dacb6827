// The CPU's part of a step's attention: workers claim blocks where they lie, attend to them, and
// leave one partial a row and head for the device to merge.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/attention/row_workers.h"
#include "engine/attention/step_attention.h"
#include "engine/attention/worker_claims.h"
#include "engine/base/tile_layout.h"
#include "engine/device/device.h"
#include "engine/kernels/attention_partial.h"

namespace writescope::attention {

class CpuAttention {
 public:
  struct Options {
    KvGeometry geometry;
    int max_turns = 0;  // Of a step
    int num_heads = 0;
    int max_rows = 0;                     // Sequences of a decode step
    KvDtype query_dtype = KvDtype::kF32;  // As the device publishes them
    int num_workers = 1;
    // A worker that finds no query naps this long between looks; 0 keeps it spinning.
    absl::Duration nap = absl::Microseconds(20);
    const kernels::AttentionVariant* variant = &kernels::ActiveAttentionVariant();
  };
  // The fastest variant, as exact as the device: `products` is what that multiplies.
  static const kernels::AttentionVariant& VariantFor(const KvGeometry& geometry, int num_heads,
                                                     kernels::AttentionProducts products);
  static int64_t HostBytes(const Options& options);
  static absl::StatusOr<std::unique_ptr<CpuAttention>> Create(const Options& options,
                                                              device::Device& device);

  // Page-locked: the device writes queries, reads partials, and sees the flags. Rows are those of
  // the whole step, so that two micro-batches never touch the same.
  std::byte* queries(int row) {  // [max_rows, num_heads, k_dim] of query_dtype
    return queries_ + row * query_row_bytes_;
  }
  float* out() { return out_; }             // [max_rows, num_heads, v_dim]
  float* lse() { return lse_; }             // [max_rows, num_heads]
  HandoffFlags* flags() { return flags_; }  // [max_turns]

  // Engine thread, before the workers of a step start.
  void ResetPartials(int num_rows);
  // The body of a worker: all turns of the step.
  void RunWorker(int worker, StepContext& step);

 private:
  // Some heads of a row, which workers merge one at a time. A line of its own: what the next worker
  // has to know comes with the lock.
  struct alignas(64) Part {
    static constexpr int64_t kMaxHeads = 12;
    std::atomic<bool> is_taken{false};
    int64_t turn = -1;  // That lse and the part of out_ are of, counted over all steps
    std::atomic<float> lse[kMaxHeads] = {};  // Written with the lock, read without
  };
  static_assert(sizeof(Part) == 64);
  // Of a row. Workers that have merged all its parts wish for its line of lse_ to be written.
  struct alignas(64) Row {
    std::atomic<int> wishes{0};
    RowWorkers workers;
  };

  // A worker's running states; a row's are made empty when the layer's first claim touches it.
  struct Worker {
    struct Slot {
      bool is_used = false;
      bool has_entered = false;           // RowWorkers knows of it.
      std::atomic<bool> is_left = false;  // Until another worker has merged it
    };
    std::vector<float> o, m, l;  // By slot
    std::vector<Slot> slots;     // [max_rows + kMaxLeft]
    std::vector<int> slot_of;    // [max_rows]: where a row's state is, or -1
    std::vector<int> left_slot;  // [max_rows]: where the row's state is that was left
    std::vector<int> touched_rows;
    std::vector<Run> now, next;  // Scratch: what it attends to, and what that comes before
    std::vector<int64_t> parts;  // Of touched rows, still to merge into out_ and lse_
    // What the kernel keeps from a call to the next one for the same readers.
    struct alignas(64) Line {
      std::byte bytes[64];
    };
    std::vector<Line> kept;
    bool is_kept = false;
    Run kept_of;                 // Whose readers' it is
    std::vector<float> widened;  // Queries of the call, where they are published as bf16
    // Scratch of one kernel call.
    std::vector<kernels::KvHeadBlock> blocks, next_blocks;
    std::vector<const float*> q_rows;
    std::vector<float*> o_rows, m_rows, l_rows;
  };

  CpuAttention(const Options& options, device::Buffer handoff);
  // Waits for the query with the worker's claim, and fetches what that begins with meanwhile: much
  // of a layer's time goes by without a query, in which memory has nothing else to do for the CPU.
  bool AwaitQuery(int index, StepContext& step, int turn);
  // Goes on from the worker's claim until nothing is left of the layer for it; the number of
  // blocks. -1 when told to stop.
  int64_t AttendTurn(int index, StepContext& step, int turn);
  // Asks for the very first lines of a claim that was not made ahead; the kernels fetch what comes
  // after them.
  void FetchFirst(const StepContext& step, int turn, const Run& part) const;
  // `next` is what the worker attends to afterwards, or null.
  void AttendPart(Worker& worker, const StepContext& step, int turn, const Run& part,
                  const Run* next);
  kernels::AttentionPartialArgs CallFor(Worker& worker, bool is_left) const;
  // Ends with what the kernel keeps: sums come to where they belong.
  void BringKept(Worker& worker);
  void Touch(Worker& worker, int turn, int row);
  int FreeSlot(const Worker& worker) const;
  // Of a touched row: its first head's place in o, m and l, in heads.
  int64_t SlotHead(const Worker& worker, int row) const {
    return worker.slot_of[static_cast<size_t>(row)] * int64_t{options_.num_heads};
  }
  // Sets q_rows to the queries of the readers' heads, head by head.
  void FindQueries(Worker& worker, const StepAttention& attention, std::span<const int> readers,
                   bool is_left) const;
  // Leaves what the worker has to others that attend to the same rows still; what remains stands in
  // touched_rows, with what others have left to it.
  void LeaveToOthers(Worker& worker, int turn);
  void AddLeft(Worker& worker, int row, Worker& other);
  // Merges what the worker has into out_ and lse_, or leaves it to others that will.
  void Flush(Worker& worker, int turn);
  // False when another worker has the part. Turns are counted over all steps.
  bool FlushPart(Worker& worker, int row, int64_t of_row, int64_t of_turn);
  // Brings the row's log-sum-exps to lse_, one worker at a time: who finds one at it leaves it to
  // that one, which looks again. A line of lse_ belongs to many parts; were it written with each,
  // it would go from core to core with every merge, and the lock after it would wait.
  void PublishLse(int row);

  const Options options_;
  const kernels::AttentionVariant& variant_;
  device::Buffer handoff_;
  const int64_t query_row_bytes_;
  std::byte* queries_ = nullptr;
  float* out_ = nullptr;
  float* lse_ = nullptr;
  HandoffFlags* flags_ = nullptr;
  std::vector<Worker> workers_;
  WorkerClaims claims_;
  const int64_t heads_a_part_;
  const int64_t parts_a_row_;
  std::vector<Part> parts_;  // [max_rows, parts_a_row_]
  std::vector<Row> rows_;    // [max_rows]
  // Of a worker's states, those that wait for another worker at once
  static constexpr int kMaxLeft = 2;
  int64_t num_steps_ = 0;
};

}  // namespace writescope::attention
