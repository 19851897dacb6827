// Small kernels of the queues themselves.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace writescope::device {

// What a queue and the host share: page-locked, mapped memory.
struct QueueWords {
  uint64_t completed = 0;  // The last ticket that is done
  uint32_t failed = 0;     // A wait for a flag ran out
};

// Ends when *flag >= value, or after timeout_ns with *failed (device) and *failed_host set. Ends at
// once when *failed is set already. `flag` and `failed_host` are mapped host memory.
cudaError_t LaunchWaitFlag(cudaStream_t stream, const uint64_t* flag, uint64_t value,
                           uint64_t timeout_ns, uint32_t* failed, uint32_t* failed_host);

}  // namespace writescope::device
