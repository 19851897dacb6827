// The roofline of a decode step whose KV cache is shared by two processors: from rates and bytes to
// times and to the CPU's best share. Pure: values in, values out, any thread. Every function is
// total: NaN, infinite, negative and zero inputs give finite results, and shares stay in [0, 1].
//
// A step has two phases. For D seconds ("dense") the CPU has no query, and the link streams ahead
// alone at link_alone. Then, for x seconds, CPU and link work side by side at cpu_with_link and
// link_with_cpu; whoever has work left when the other has finished goes on at its "alone" rate. The
// step takes D + x.
#pragma once

namespace writescope::roofline {

// Bytes of KV per second; 0 means "cannot" for CPU and link, "not the limit" for the device.
struct Rates {
  double cpu_alone = 0;      // CPU attention while the link is idle.
  double cpu_with_link = 0;  // CPU attention while the link streams. 0: as alone.
  double link_alone = 0;     // Host to device while the CPU is idle.
  double link_with_cpu = 0;  // Host to device while the CPU attends. 0: as alone.
  double device = 0;         // Device attention over device memory.
};

struct StepLoad {
  double spilled_bytes = 0;  // S: spilled KV that the step reads, each shared byte once.
  double host_bytes = 0;     // Of them, bytes that only the CPU can read.
  double stream_bytes = 0;   // Of them, bytes that only the link can carry.
  double dense_seconds = 0;  // D: device time in which the CPU has no query.
  // The part of D in which the link can stream ahead; below 1 when the ring is too small for more.
  double ahead_fraction = 1;
  // A: device attention whose time does not depend on the share (resident KV). The device's part of
  // the spilled bytes is added at Rates::device.
  double device_attention_seconds = 0;
  double handoff_seconds = 0;  // Of all layers together; paid when the CPU takes part.
};

struct ShareInterval {
  double min_share = 0;
  double max_share = 1;
};

struct BestShareResult {
  double share = 0;             // s*, the CPU's fraction of spilled_bytes.
  double step_seconds = 0;      // T*, what PredictStep says of it.
  double cpu_busy_seconds = 0;  // x: the part of the step in which both sides have a query.
};

// The shares that rigid regions allow: [host/S, 1 - stream/S]; [0, 1] when nothing is spilled.
ShareInterval FeasibleShares(const StepLoad& load);

// Of the feasible shares whose PredictStep is within kIndifferent of the least, the one nearest to
// where both sides finish together, c1 / (c1 + p1) * (1 - p0 * D / S). That one has the most slack
// either way, and a smaller gain is within the error of any measurement.
inline constexpr double kIndifferent = 0.01;
BestShareResult BestShare(const StepLoad& load, const Rates& rates);

// Seconds of a step at `share`, moved into the feasible interval first. NaN counts as its lower
// end.
double PredictStep(const StepLoad& load, const Rates& rates, double share);

// Two micro-batches take turns: one is dense while the other is attended to. `load` is the whole
// batch, but for load.dense_seconds, which is what PingPongDenseSeconds says. `half_dense_seconds`
// is D of half a batch, which the device does twice besides its attention.
double PredictPingPong(const StepLoad& load, const Rates& rates, double half_dense_seconds,
                       double share);
BestShareResult BestPingPong(const StepLoad& load, const Rates& rates, double half_dense_seconds);
// D of a step of two micro-batches: the dense work before the first one's attention in the first
// layer and after the second one's in the last, which nothing hides.
double PingPongDenseSeconds(double half_dense_seconds, int num_layers);

// StepLoad::ahead_fraction of a link whose staging ring holds `ring_bytes`: in each of the layers'
// parts of D it goes on until the ring is full of what nobody reads yet.
double AheadFraction(double link_alone, double dense_seconds, double ring_bytes, int num_layers);

// What remains of a link's rate when every copy of `copy_bytes` costs a fixed time on top.
double LinkRateForCopies(double link_bytes_per_second, double copy_bytes,
                         double copy_overhead_seconds);

// An upper limit to every time that these functions return: "never" as a finite number.
inline constexpr double kNeverSeconds = 1e9;

}  // namespace writescope::roofline
