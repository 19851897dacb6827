// A plain read of device memory: what nothing that reads each byte once can beat.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace writescope::bench {

// Reads `size_bytes`, a multiple of 16. What is read decides whether `sink` is written, so that the
// compiler keeps the reads.
cudaError_t LaunchDeviceRead(cudaStream_t stream, const std::byte* from, int64_t size_bytes,
                             uint32_t* sink);

}  // namespace writescope::bench
