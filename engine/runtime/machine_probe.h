// What `writescope doctor` measures of a machine, and what it says about it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/base/tile_layout.h"
#include "engine/device/device.h"
#include "engine/kernels/attention_partial.h"
#include "engine/roofline/machine_profile.h"

namespace writescope::runtime {

// Of this process's surroundings; read, not measured.
struct SystemFacts {
  std::string cpu_model;
  std::string isa;  // That attention kernels use
  int usable_cores = 0;
  int machine_cores = 0;
  int64_t usable_memory_bytes = 0;
  int64_t memlock_limit_bytes = 0;  // -1: none
  std::string huge_pages;           // Of transparent ones: always, madvise or never
  int numa_nodes = 1;
};
SystemFacts ReadSystemFacts();

struct CopyRate {
  int64_t copy_bytes = 0;
  double bytes_per_s = 0;
};
struct WorkerRates {
  int workers = 0;
  roofline::Rates rates;
};
struct HandoffTimes {
  double median_s = 0;
  double p99_s = 0;
};

struct MachineProbeOptions {
  KvGeometry geometry;
  int query_group = 1;
  kernels::AttentionProducts products = kernels::AttentionProducts::kBf16;
  int64_t host_bytes = 0;    // Of the buffer that is read and copied
  int64_t device_bytes = 0;  // At least the largest copy
  double seconds = 0.2;      // Of each measurement
};

// Copies of each size from 16 KiB up to device_bytes, two in flight.
absl::StatusOr<std::vector<CopyRate>> MeasureCopies(device::Device& device,
                                                    const MachineProbeOptions& options);
// Attention and copies, alone and together, for worker counts up to the usable cores.
absl::StatusOr<std::vector<WorkerRates>> MeasureWorkers(device::Device& device,
                                                        const MachineProbeOptions& options);
// From the CPU's store of a flag until it sees the one that the device sets after it.
absl::StatusOr<HandoffTimes> MeasureHandoff(device::Device& device);

struct Diagnosis {
  SystemFacts facts;
  std::vector<CopyRate> copies;
  std::vector<WorkerRates> workers;
  HandoffTimes handoff;
  roofline::MachineProfile profile;  // With the worker count that moves most bytes together
  std::vector<std::string> warnings;
  std::string flags;  // For writescope-worker
  std::string ToString() const;
};
absl::StatusOr<Diagnosis> Diagnose(device::Device& device, const MachineProbeOptions& options,
                                   int64_t vram_budget_bytes);

}  // namespace writescope::runtime
