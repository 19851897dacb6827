// Tests that need a GPU: without one they are skipped, or fail under REQUIRE_GPU=1.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

namespace writescope::testing {

inline bool HasGpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}
inline bool GpuRequired() {
  const char* value = std::getenv("REQUIRE_GPU");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

}  // namespace writescope::testing

#define SKIP_WITHOUT_GPU()                                                          \
  do {                                                                              \
    if (::writescope::testing::HasGpu()) break;                                     \
    if (::writescope::testing::GpuRequired()) FAIL() << "REQUIRE_GPU=1 and no GPU"; \
    GTEST_SKIP() << "no GPU";                                                       \
  } while (false)
