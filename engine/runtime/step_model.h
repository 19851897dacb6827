// What the engine itself expects of its steps: the rates that it started with, and what its own
// steps have shown since. For predictions, and for the shares in force without a controller.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/roofline/roofline.h"
#include "engine/roofline/share_table.h"
#include "engine/runtime/step_stats.h"

namespace writescope::runtime {

// Pure, but for what it has been told. Symbols as in engine/roofline.
class StepModel {
 public:
  struct Options {
    roofline::Rates rates;
    double handoff_seconds = 0;  // Of all layers
    int num_layers = 1;
    int64_t ring_bytes = 0;
    // For the table of shares: KV that the device holds and a step reads as a whole, and that the
    // host can hold.
    int64_t device_kv_bytes = 0;
    int64_t host_kv_bytes = 0;
  };
  explicit StepModel(const Options& options) : options_(options), rates_(options.rates) {}

  // D of one step in one micro-batch, whether the CPU had a query in it or not. Smoothed for each
  // range of batch sizes; the first counts as it is.
  void LearnDense(int batch_size, double seconds);
  // Bytes that the device attended to in `seconds`, wherever they came from.
  void LearnDeviceAttention(int64_t bytes, double seconds);

  // A decode step over spilled KV. How far steps in one and in two micro-batches are behind their
  // prediction is learnt for each range of batch sizes, and D of a part from steps in two.
  struct TakenStep {
    int batch_size = 0;
    int micro_batches = 1;
    double predicted_seconds = 0;
    double seconds = 0;
    double part_dense_seconds = 0;  // D of one of two parts
  };
  void LearnStep(const TakenStep& step);

  // D of a batch: as measured at the nearest size, smaller ones first; 0 before any.
  double DenseSeconds(int batch_size) const;
  double PredictSeconds(int batch_size, const StepBytes& bytes, double cpu_share) const;
  // A step in two micro-batches, beside the same in one with `whole_share`. Where two would pay if
  // D of a part were as short as it can be, a few steps are taken so, which tell. Steps in two that
  // turn out slower than those of the whole batch pay no longer; after some hundred steps they are
  // tried again, where they should be faster.
  struct Part {
    int batch_size = 0;
    StepBytes bytes;
  };
  struct TwoParts {
    bool pays = false;
    double cpu_share = 0;  // The best, where it pays
    double seconds = 0;
  };
  TwoParts PlanTwoParts(const std::array<Part, 2>& parts, const Part& whole,
                        double whole_share) const;
  // Whether steps of this batch have shown what PlanTwoParts goes by; until then it tries.
  bool HasChosen(int batch_size) const;
  // BestShare for every batch size that D is known of: at first, and whenever steps have shown
  // another D than that in the last table. It may have been of a busy machine, and the one measured
  // at the start is of steps submitted call by call. Not within a second of the last table.
  std::optional<roofline::ShareTable> NewTable(double now_s);

 private:
  struct Dense {
    int bucket = 0;  // Of batches of up to 2^bucket
    double seconds = 0;
    int num_steps = 0;  // That it was learnt from
  };
  // Of steps of one kind: what they took in units of what was predicted.
  struct Behind {
    double ratio = 1;
    int num_steps = 0;
    bool known() const;
    void Learn(double value);
  };
  // What steps of a range of batch sizes have shown.
  struct Kinds {
    int bucket = 0;
    Behind whole, two;
    double part_dense_seconds = 0;  // 0 before any step in two

    bool is_trying_two() const { return two.num_steps > 0 && !two.known(); }
    // How much further steps in two are behind their prediction than those of the whole batch;
    // without bound where only those in two are known, so that the others come to be.
    double TwoBehindWhole() const;
  };
  const Dense* FindDense(int batch_size) const;
  Kinds KindsOf(int batch_size) const;
  roofline::StepLoad LoadOf(const StepBytes& bytes, double dense_seconds) const;
  double AheadFraction(double dense_seconds) const;
  double ResidentSeconds(int64_t bytes) const;
  bool TableIsOld(double now_s) const;

  const Options options_;
  roofline::Rates rates_;  // `device` is learnt
  bool device_measured_ = false;
  std::vector<Dense> dense_;  // Ascending
  std::vector<Kinds> kinds_;
  std::vector<Dense> dense_in_table_;  // As dense_ was
  double table_made_s_ = 0;
};

}  // namespace writescope::runtime
