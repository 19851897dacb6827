// Which device the tests of whole models run on: the CPU device, or a GPU when the environment says
// WRITESCOPE_TEST_DEVICE=cuda (with WRITESCOPE_TEST_COMPUTE=f32 or bf16, f32 if unset).
#pragma once

#include <cstdlib>
#include <string_view>

#include "engine/base/units.h"
#include "engine/runtime/engine.h"

namespace writescope::testing {

inline std::string_view Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

inline bool OnCuda() { return Environment("WRITESCOPE_TEST_DEVICE") == "cuda"; }

// Whether products and activations are bf16: tests of exact numbers give way then.
inline bool ComputesInBf16() {
  return OnCuda() && Environment("WRITESCOPE_TEST_COMPUTE") == "bf16";
}

// Points the options at the device under test. A GPU's context takes part of any budget.
inline void UseTestDevice(runtime::EngineOptions& options) {
  if (!OnCuda()) return;
  options.device = runtime::DeviceKind::kCuda;
  options.compute_dtype =
      ComputesInBf16() ? runtime::ComputeDtype::kBf16 : runtime::ComputeDtype::kF32;
  options.vram_budget_bytes += 2 * kGiB;
  options.force_simt = !Environment("WRITESCOPE_TEST_SIMT").empty();
}

}  // namespace writescope::testing
