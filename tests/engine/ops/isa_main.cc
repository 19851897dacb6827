// Runs the tests under WRITESCOPE_FORCE_ISA where it is set. On a processor that does not offer the
// instruction set they are skipped: CTest takes this exit status for that.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "engine/base/cpu_features.h"

int main(int argc, char** argv) {
  constexpr int kSkipped = 77;
  testing::InitGoogleTest(&argc, argv);
  if (const char* forced = std::getenv("WRITESCOPE_FORCE_ISA"); forced != nullptr) {
    const auto isa = writescope::ParseCpuIsa(forced);
    if (isa.has_value() && *isa > writescope::DetectedCpuIsa()) {
      std::printf("skipped: this processor does not offer %s\n", forced);
      return kSkipped;
    }
    std::printf("instruction set: %s\n", forced);
  }
  return RUN_ALL_TESTS();
}
