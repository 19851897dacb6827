// What the engine knows of an accelerator and its link: memory, ordered queues, events, copies.
// Behind it are the CUDA device (cuda/), and the CPU device (cpu/), which stands in for an
// accelerator on a machine without one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace writescope::device {

class Queue;

// A point in a queue's work. A default event is done. Cheap to copy; must not outlive its queue.
struct Event {
  Queue* queue = nullptr;
  uint64_t ticket = 0;

  bool Done() const;
  // DEADLINE_EXCEEDED when the point is not reached within `timeout`.
  absl::Status Wait(absl::Duration timeout) const;
};

// Seconds on the host's steady clock; what RecordTime writes.
double NowSeconds();

// Of a wait for a flag: the end of all work before it, and when the queue had seen the flag or
// given up, which is no earlier.
struct WaitTimes {
  double began_s = 0;
  double seen_s = 0;
};

// Work in order, asynchronous to the caller. One thread submits at a time; the rest is thread-safe.
class Queue {
 public:
  virtual ~Queue() = default;
  virtual std::string_view name() const = 0;

  // The point after everything submitted so far.
  virtual Event Record() = 0;
  // Work submitted from now on starts after `event`, which may be of another queue.
  virtual void WaitFor(Event event) = 0;
  // Copies bytes. On the link's queues one side is host memory made by this device.
  virtual void Copy(std::byte* to, const std::byte* from, int64_t size_bytes) = 0;
  // Sets bytes of device memory to zero.
  virtual void Zero(std::byte* to, int64_t size_bytes) = 0;
  // The same for `num_rows` rows of `row_bytes`, `stride_bytes` from one to the next.
  virtual void ZeroRows(std::byte* to, int64_t row_bytes, int64_t stride_bytes,
                        int64_t num_rows) = 0;
  // Writes the time at which the queue gets here, at the latest when someone has waited for a later
  // point. `seconds` lives until the queue has passed.
  virtual void RecordTime(double* seconds) = 0;
  // Writes the times of what the queue has passed. For a thread that has nothing else to do: of
  // many times this takes milliseconds, and whoever waits for the queue would spend them.
  virtual void WriteTimes() const {}

  // Publishes everything submitted before, then stores `value`; the CPU polls the flag.
  virtual void SetFlag(std::atomic<uint64_t>* flag, uint64_t value) = 0;
  // Work submitted from now on starts once the flag is at least `value`. When that takes longer
  // than `timeout` the wait ends with an error (see TakeError), so that a dead CPU side cannot hang
  // a queue. `times`, where not null, is filled as RecordTime's is.
  virtual void WaitFlag(const std::atomic<uint64_t>* flag, uint64_t value, absl::Duration timeout,
                        WaitTimes* times) = 0;

  // The highest ticket that is done.
  virtual uint64_t completed_ticket() const = 0;
  virtual absl::Status WaitTicket(uint64_t ticket, absl::Duration timeout) const = 0;

  // The first failure of any work here since the last TakeError (a bounded wait that ran out, say).
  // Later work still runs; whoever uses its results asks first.
  virtual absl::Status TakeError() = 0;
  // Whether there is an error to take. From a wait that ran out until then, work of the device
  // leaves memory alone that the other side of the wait may still be using.
  virtual bool failed() const = 0;
};

// Waits until all that has been submitted to the queues has run. For destructors, whose memory that
// work uses: freed earlier, it would be written to by whoever comes late. So this has no limit but
// those of the work itself; the log tells while it takes long.
void AwaitIdle(std::initializer_list<Queue*> queues, std::string_view who);

inline bool Event::Done() const { return queue == nullptr || queue->completed_ticket() >= ticket; }
inline absl::Status Event::Wait(absl::Duration timeout) const {
  return queue == nullptr ? absl::OkStatus() : queue->WaitTicket(ticket, timeout);
}

// Memory with one owner; freed with it. Where the bytes may be read depends on who made it.
class Buffer {
 public:
  Buffer() = default;
  // `release` runs once, at the end.
  Buffer(std::byte* data, int64_t size_bytes, void (*release)(void* context, std::byte*, int64_t),
         void* context)
      : data_(data), size_bytes_(size_bytes), release_(release), context_(context) {}
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer() { Reset(); }
  void Reset();

  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }
  std::span<std::byte> bytes() const { return {data_, static_cast<size_t>(size_bytes_)}; }

 private:
  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
  void (*release_)(void*, std::byte*, int64_t) = nullptr;
  void* context_ = nullptr;
};

enum class HostMemory {
  kPageLocked,  // The link reads and writes it at full speed; cacheable for the CPU.
  kPageable,    // Only the CPU reads it; the link may still write it.
};

struct LinkInfo {
  bool simulated = false;
  // Pace of the simulated link; 0 is unpaced. Unused on a real one.
  double pace_bytes_per_s = 0;
};

// Thread-safe, but for what a queue says of itself.
class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;
  // The hardware, for people.
  virtual std::string description() const { return name(); }

  // Device memory, zeroed. RESOURCE_EXHAUSTED with the numbers when the budget has no room.
  virtual absl::StatusOr<Buffer> AllocateDevice(int64_t size_bytes, std::string_view label) = 0;
  // Host memory, zeroed and touched. RESOURCE_EXHAUSTED when it cannot be had or page-locked.
  virtual absl::StatusOr<Buffer> AllocateHost(int64_t size_bytes, HostMemory kind,
                                              std::string_view label) = 0;
  virtual int64_t device_budget_bytes() const = 0;
  virtual int64_t device_used_bytes() const = 0;

  // Kernels and copies inside the device.
  virtual Queue& compute() = 0;
  // Host to device, and device to host: the link.
  virtual Queue& upload() = 0;
  virtual Queue& download() = 0;

  virtual LinkInfo link() const = 0;
  // FAILED_PRECONDITION where the link is real; INVALID_ARGUMENT below 0 or not finite.
  virtual absl::Status SetLinkPace(double bytes_per_s) = 0;
};

}  // namespace writescope::device
