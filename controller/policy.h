// Policy: the last word on every share. Pure: the same input gives the same decision, which is what
// lets a decision log be replayed against other settings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "engine/roofline/roofline.h"
#include "engine/roofline/share_table.h"

namespace writescope::controller {

struct PolicyOptions {
  // A table is pushed when it moves the share of steps like the present one by more than this,
  double hysteresis = 0.015;
  // or when the share in force makes the present step slower than need be by more than this
  // fraction.
  double max_loss = 0.02;
  // At most so much of a move in one push.
  double max_change = 0.2;
  // Inside the swing interval no share may be slower than the lowest one by more than this
  // fraction, by the measured rates.
  double guard = 0.03;
  // Steps with spilled KV to have seen before the first push.
  uint64_t min_steps = 4;
  // The operator's share. Nothing but the placement's interval stands above it.
  std::optional<double> pin_share;

  // INVALID_ARGUMENT naming the option and its value.
  absl::Status Validate() const;
};

struct PolicyInput {
  // What the roofline computes the wanted table from.
  roofline::TableSpec spec;
  // The present step.
  uint32_t batch_size = 0;
  uint64_t spilled_bytes = 0;
  // What the placement allows.
  roofline::ShareInterval allowed;
  // The table that this controller has in force; nothing when the worker goes by its own. One that
  // breaks the rules of ShareTable counts as nothing.
  std::optional<roofline::ShareTable> in_force;
  // Whether the lease has to be renewed now.
  bool lease_due = false;
  uint64_t num_steps_seen = 0;
};

enum class Action { kHold, kPush, kRenew };
const char* ActionName(Action action);

struct Decision {
  Action action = Action::kHold;
  std::string reason;
  roofline::ShareTable table;  // To push; when held, what is in force, or nothing.
  // For a step like the present one:
  double share = 0;                     // By `table`.
  double wanted_share = 0;              // By the roofline, clamped to what is allowed.
  double predicted_seconds = 0;         // At `share`.
  double predicted_wanted_seconds = 0;  // At `wanted_share`.
  double predicted_lowest_seconds = 0;  // At the lowest share that is allowed.
  int num_clamped = 0;                  // Points that the interval moved,
  int num_limited = 0;                  // that max_change held back,
  int num_guarded = 0;                  // and that the guard moved.
};

Decision Decide(const PolicyOptions& options, const PolicyInput& input);

// The load of a step of `batch_size` with `spilled_bytes`, without rigid bytes.
roofline::StepLoad LoadFor(const roofline::TableSpec& spec, uint32_t batch_size,
                           double spilled_bytes);

// The largest difference for steps like this one: half to four times its spilled bytes. When
// nothing is spilled, of the whole tables.
double DifferenceNear(const roofline::ShareTable& a, const roofline::ShareTable& b,
                      uint32_t batch_size, uint64_t spilled_bytes);

}  // namespace writescope::controller
