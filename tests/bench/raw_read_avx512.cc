// Built with -mavx512f.
#include "tests/bench/raw_read.h"
#include "tests/bench/raw_read_loop.h"

namespace writescope::bench {

uint64_t RawReadAvx512(const std::byte* data, int64_t size_bytes) {
  return ReadLines(data, size_bytes);
}

}  // namespace writescope::bench
