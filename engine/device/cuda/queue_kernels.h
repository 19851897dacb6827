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

struct FlagWait {
  const uint64_t* flag = nullptr;  // Mapped host memory
  uint64_t value = 0;
  uint64_t timeout_ns = 0;
  uint32_t* failed = nullptr;       // Device
  uint32_t* failed_host = nullptr;  // Mapped
  // Mapped; null, or the device's time when all before it was done, and when the flag was seen too.
  uint64_t* began_ns = nullptr;
  uint64_t* seen_ns = nullptr;
};
// Ends when *flag >= value, or after timeout_ns with *failed and *failed_host set. Ends at once
// when *failed is set already. It begins to look while the kernel before it ends. A kernel launched
// early behind it begins when the flag has been seen, and all before the wait is done, while the
// last looks at it are still on their way back: from the CPU it then reads past caches.
cudaError_t LaunchWaitFlag(cudaStream_t stream, const FlagWait& wait);

// What DeviceClock and the device tell each other: page-locked, mapped memory.
struct ClockWords {
  uint64_t ready = 0;  // By the device: it looks at `go` now
  uint64_t go = 0;
  uint64_t stamp_ns = 0;  // By the device: its time when it saw `go`, or had waited for long enough
  uint64_t done = 0;      // By the device: the stamp is written
  uint64_t ended_ns = 0;  // By the device: its time at the end of the kernel that stamps
  uint64_t begun_ns = 0;  // And at the begin of the next
  uint64_t followed = 0;  // By the device: both are written
};
// Sets ready to `turn`, waits until go is, at most timeout_ns, and stamps. Its end it leaves in
// *ended_ns, which is the device's own: it has nothing to wait for behind it.
cudaError_t LaunchClockStamp(cudaStream_t stream, ClockWords* words, uint64_t turn,
                             uint64_t timeout_ns, uint64_t* ended_ns);
// Behind that one, with an event between: tells between which times the event was.
cudaError_t LaunchClockFollow(cudaStream_t stream, ClockWords* words, uint64_t turn,
                              const uint64_t* ended_ns);

}  // namespace writescope::device
