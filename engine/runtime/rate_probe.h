// Measures, at start, the rates that the roofline needs: CPU attention and the link, alone and
// together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "engine/base/tile_layout.h"
#include "engine/device/device.h"
#include "engine/kernels/attention_partial.h"
#include "engine/model/config.h"
#include "engine/roofline/machine_profile.h"
#include "engine/runtime/engine.h"

namespace writescope::runtime {

struct RateProbeOptions {
  KvGeometry geometry;
  int query_group = 1;  // Query heads of a KV head
  int num_workers = 1;
  double seconds = 0.03;  // Of each of the three measurements
  // Memory to use at most; smaller than the budgets, which have nothing else in them yet.
  int64_t host_bytes = 8 << 20;
  int64_t device_bytes = 2 << 20;
  int64_t copy_bytes = 256 << 10;
  // Where not empty, memory to use in place of the probe's own `host_bytes` and `device_bytes`:
  // page-locked host memory, which is read, and device memory, which is written.
  std::span<const std::byte> memory;
  std::span<std::byte> device_memory;
  kernels::AttentionProducts products = kernels::AttentionProducts::kF32;  // As the workers'
  // Reads [data, data + size_bytes) in place of attention, for the rates of memory itself.
  void (*read)(const std::byte* data, int64_t size_bytes) = nullptr;
};
// Of options in which every default is filled in. On a real accelerator the buffers are larger than
// any cache, so that the rates are those of memory.
RateProbeOptions ProbeOptionsFor(const EngineOptions& options, const model::ModelConfig& config,
                                 int64_t host_total_bytes);

// Attends to blocks of a scratch buffer in host memory with the workers' kernel, and copies them
// over the link, first alone, then both at once. Queries are drawn, and in memory of the probe's
// own keys and values too: with zeros no row's greatest score ever changes, and products take less
// power, which made some percent on an Emerald Rapids. Memory that is given is read as it is. Takes
// about four times `seconds`, and memory that it gives back. An error where memory cannot be had,
// and where the link does not copy: rates of what came over would be no rates.
absl::StatusOr<roofline::MachineProfile> ProbeRates(device::Device& device,
                                                    const RateProbeOptions& options);

}  // namespace writescope::runtime
