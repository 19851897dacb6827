// CPU and GPU on one step: starts both sides, and merges a turn when every claim has reported.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/attention/cpu_attention.h"
#include "engine/attention/cpu_reserve.h"
#include "engine/attention/link_pump.h"
#include "engine/attention/step_attention.h"
#include "engine/attention/step_trace.h"
#include "engine/attention/worker_team.h"
#include "engine/device/device.h"
#include "engine/ops/ops.h"

namespace writescope::attention {

// What a step's attention did and took; seconds of wall-clock, summed over layers.
struct AttentionStats {
  int64_t spilled_bytes = 0;
  int64_t stream_region_bytes = 0;
  int64_t host_region_bytes = 0;
  int64_t cpu_bytes = 0;
  int64_t link_bytes = 0;
  int64_t resident_bytes = 0;
  double cpu_busy_s = 0;
  double link_busy_s = 0;
  double both_busy_s = 0;
  int64_t cpu_bytes_both_busy = 0;
  int64_t link_bytes_both_busy = 0;
  double dense_s = 0;         // In which the CPU has no query
  double device_dense_s = 0;  // Of the device's work besides attention, whoever has a query
  double device_attention_s = 0;
  // While the device had nothing to attend to until spilled blocks had landed, and their turn's
  // waves had been submitted.
  double link_wait_s = 0;
  int copies = 0;
  // By micro-batch: blocks of its swing list in front of the cut, mean over layers.
  std::vector<double> mean_cut_blocks;
  // By turn with a hand-off: from the query's publication to the CPU's start, and, where the
  // device had to wait for the CPU, from the last report until the device went on.
  std::vector<double> handoff_out_s;
  std::vector<double> handoff_back_s;
};

// How the spilled blocks of a step are shared.
struct SharePlan {
  bool meet = false;
  double cpu_share = 0;  // planned: the CPU's part of all spilled bytes
  // Without it the CPU gets no query at all, and host runs are streamed: prefill, and steps that
  // are faster on the device alone.
  bool handoff = false;
  int num_workers = 0;  // Of the CPU's, as many as attend; 0: all
};
// Where both sides claim until they meet, the link takes what it can in any order.
inline RunOrder OrderFor(const SharePlan& plan) {
  return plan.handoff && !plan.meet ? RunOrder::kShortLast : RunOrder::kByReader;
}

// Engine thread. One step at a time.
class HybridAttention {
 public:
  struct Options {
    KvGeometry geometry;
    int num_layers = 0;
    int num_heads = 0;
    int out_dim = 0;  // Of v_dim, what the model keeps
    int max_sequences = 0;
    int num_workers = 1;
    int64_t ring_bytes = 0;
    absl::Duration wait_limit = absl::Seconds(2);
    absl::Duration nap = absl::Microseconds(20);
  };
  static absl::StatusOr<std::unique_ptr<HybridAttention>> Create(const Options& options,
                                                                 ops::Ops& ops,
                                                                 const kvcache::BlockTable& blocks);
  ~HybridAttention();

  // Starts the pump and, with a hand-off, the workers. Of one micro-batch or, for steps with a row
  // a sequence, two, whose rows come one after the other's. Keeps the step: a thread that is late
  // may look at it when the caller has given up.
  void BeginStep(std::vector<StepAttention> micro_batches, const SharePlan& plan);
  // Other work for the device in time that it would spend waiting: may be called any number of
  // times inside EndTurn, and returns soon after `still_waiting` has become false, not before.
  // While it is given nothing waits on the device's queue, where it would hold the other work up.
  using Between = std::function<void(const std::function<bool()>& still_waiting)>;
  // For each turn in order: submits what gives the CPU its query, and the attention over what lies
  // on the device. q is device [rows of the micro-batch, num_heads, k_dim], `state` of as many
  // rows. With two micro-batches a turn begins before the one before it ends.
  void BeginTurn(int turn, const float* q, const ops::AttendState& state);
  // For each turn in order: submits the rest of its attention; out are activations.
  // DEADLINE_EXCEEDED when the pump delivers nothing.
  absl::Status EndTurn(int turn, const float* q, const ops::AttendState& state, void* out,
                       const Between& between);
  // After the step's last submission: `end` is the point on the compute queue after all of it.
  // Waits for both sides. An error says that the step's results must not be used; Ok() tells
  // whether the next step may be tried.
  absl::StatusOr<AttentionStats> EndStep(device::Event end);
  // Instead, when not all turns were submitted: gives the step up.
  void CancelStep() { Abort(absl::CancelledError("the step was given up")).IgnoreError(); }
  // Of the last step that ended well, until the next begins.
  StepTrace Trace() const;
  // Whether the CPU still has work of the turn.
  bool CpuAtWork(int turn) const;
  // False once a thread of a failed step did not come back.
  bool Ok() const { return ok_; }

  // What a step reads where it lies on the device, in `layer` and with the strides to the others:
  // device runs and open tails.
  struct DeviceSpans {
    std::vector<ops::AttendSpan> spans;
    std::vector<int> readers;
  };
  DeviceSpans SpansOnDevice(const StepAttention& step, int layer) const;

  // What the link leaves to the CPU at the end of a layer of the next guided step.
  int64_t cpu_reserve_bytes() const { return cpu_reserve_.bytes(); }
  int num_workers() const { return team_->num_workers(); }
  void SetClaimHook(ClaimHook hook) { hook_ = std::move(hook); }

 private:
  // Times of one turn on the compute queue.
  struct TurnTimes {
    double dense_ended_s = 0;
    double query_published_s = 0;
    // For the CPU: from the end of the device's own part. Both are that end without a hand-off.
    device::WaitTimes wait;
  };
  // Of a call over landed blocks; an earlier one of its turn ended before. The last one of a turn
  // ends where the wait for the CPU begins.
  struct OfWave {
    bool is_wave = false;
    int ends_turn = -1;
  };
  struct OpTime {
    double start_s = 0;
    double end_s = 0;
    OfWave of_wave;
  };
  HybridAttention(const Options& options, ops::Ops& ops, const kvcache::BlockTable& blocks,
                  std::unique_ptr<CpuAttention> cpu, std::unique_ptr<LinkPump> pump);
  // The waves of the turn, as the pump delivers them.
  absl::Status AttendWaves(int turn, const float* q, const ops::AttendState& state,
                           const Between& between);
  // Other work while `waiting` holds.
  void Meanwhile(const Between& between, const std::function<bool()>& waiting) const;
  void TimedAttend(const ops::AttendArgs& args, const OfWave& of_wave);
  // Gives the pump back what has been attended to.
  void ReleaseSlots();
  // How much of a turn's list the pump leaves to the CPU at its end, by how much later the device
  // had its last wave attended to than the CPU was done.
  void LearnCpuReserve(const AttentionStats& stats);
  AttentionStats CollectStats(double begin_s, double end_s) const;
  // When the device began with the dense work that ends with the turn's query.
  double DenseBeganAt(int turn, double begin_s) const;
  void CollectDense(double begin_s, double end_s, AttentionStats* stats) const;
  void CollectHandoff(const TurnProgress& progress, const TurnTimes& times,
                      AttentionStats* stats) const;
  void CollectOverlap(AttentionStats* stats) const;
  absl::Status Abort(absl::Status why);

  const Options options_;
  ops::Ops& ops_;
  const kvcache::BlockTable& blocks_;
  std::unique_ptr<TurnProgress[]> turns_;
  std::vector<StepAttention> micro_batches_;
  StepContext step_;
  std::unique_ptr<CpuAttention> cpu_;
  // Their threads use what is above.
  std::unique_ptr<LinkPump> pump_;
  std::unique_ptr<WorkerTeam> team_;
  std::vector<TurnTimes> turn_times_;
  std::deque<OpTime> attend_times_;
  std::vector<int> slots_read_;  // By what is submitted, and not given back yet
  CpuReserve cpu_reserve_;
  double begin_s_ = 0;
  uint64_t epoch_ = 0;
  bool ok_ = true;
  ClaimHook hook_;
};

}  // namespace writescope::attention
