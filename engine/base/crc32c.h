// CRC-32C (Castagnoli), the checksum of a sealed block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace writescope {

// `seed` is the result of the bytes before, 0 at the start.
uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t seed = 0);

}  // namespace writescope
