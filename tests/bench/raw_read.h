// Plain reading, as fast as one thread can: what attention at the speed of memory is measured by.
#pragma once

#include <cstddef>
#include <cstdint>

namespace writescope::bench {

// Reads [data, data + size_bytes), a multiple of 512, once. The result keeps the reads alive.
uint64_t RawReadPlain(const std::byte* data, int64_t size_bytes);
uint64_t RawReadAvx512(const std::byte* data, int64_t size_bytes);

}  // namespace writescope::bench
