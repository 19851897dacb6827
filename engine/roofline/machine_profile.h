// MachineProfile: what the roofline has to know of a machine, as data. Shipped profiles lie in
// deploy/machine-profiles; a worker measures its own.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/roofline/roofline.h"

namespace writescope::roofline {

struct MachineProfile {
  std::string name;
  // Whether the rates were measured on such a machine; `source` says how, or what they are guessed
  // from.
  bool measured = false;
  std::string source;

  // Of plain reads and copies in large pieces.
  Rates rates;
  // The fraction of a plain read's rate that a good attention kernel reaches; in (0, 1].
  double cpu_kernel_efficiency = 1;

  int cpu_workers = 0;
  double handoff_per_layer_seconds = 0;
  // Of the model that a worker serves on this machine. No part of a profile in a file.
  int num_layers = 0;
  double copy_overhead_seconds = 0;  // Of each host-to-device copy.
  // Dense work of the device, for estimates of D: fraction of `rates.device` that it reads weights
  // at, and a fixed time per layer.
  double dense_efficiency = 0.6;
  double dense_per_layer_seconds = 60e-6;

  int64_t device_budget_bytes = 0;
  int64_t host_budget_bytes = 0;

  // INVALID_ARGUMENT naming the field: rates have to be positive and finite, "with" at most
  // "alone".
  absl::Status Validate() const;

  // Rates that attention can expect, with copies of `copy_bytes`.
  Rates AttentionRates(double copy_bytes) const;
};

// A JSON object with the fields above (rates.* end in _bytes_per_second; see the shipped files).
// Unknown fields and missing rates are errors that name the field. The result is validated.
absl::StatusOr<MachineProfile> ParseMachineProfile(std::string_view json);
absl::StatusOr<MachineProfile> ReadMachineProfile(const std::string& path);
std::string MachineProfileToJson(const MachineProfile& profile);

}  // namespace writescope::roofline
