// Tests that need a GPU: without one they are skipped, or fail under REQUIRE_GPU=1.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace writescope::testing {

inline bool EnvironmentIs(const char* name, const char* wanted) {
  const char* value = std::getenv(name);
  return value != nullptr && std::strcmp(value, wanted) == 0;
}

inline bool HasGpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}
inline bool GpuRequired() { return EnvironmentIs("REQUIRE_GPU", "1"); }

// Whether tests of kernels take small cases only, few, but with them every kernel: tools that look
// at each access make a kernel a hundred and more times slower.
inline bool SmallSizes() { return EnvironmentIs("WRITESCOPE_TEST_SIZES", "small"); }
// Whether to pass over a case.
inline bool LeftOut(bool is_small) { return SmallSizes() && !is_small; }

// Device memory comes in units of 2 MiB, so that an access past the end of less is seen by nobody.
// With small sizes memory is taken from a unit's end: how far into it, 16-byte places kept.
inline int64_t BytesBefore(int64_t size_bytes) {
  constexpr int64_t kUnitBytes = 2 << 20;
  return SmallSizes() ? (kUnitBytes - size_bytes % kUnitBytes) % kUnitBytes / 16 * 16 : 0;
}

}  // namespace writescope::testing

#define SKIP_WITHOUT_GPU()                                                          \
  do {                                                                              \
    if (::writescope::testing::HasGpu()) break;                                     \
    if (::writescope::testing::GpuRequired()) FAIL() << "REQUIRE_GPU=1 and no GPU"; \
    GTEST_SKIP() << "no GPU";                                                       \
  } while (false)
