// Seeds of random tests: fixed unless TEST_SEED is set, and always printed, so that a failure can
// be run again.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace writescope::testing_support {

inline uint64_t TestSeed(uint64_t fallback = 20240917) {
  const char* text = std::getenv("TEST_SEED");
  const uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : fallback;
  std::printf("TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace writescope::testing_support
