#include <chrono>
#include <string>
#include <utility>

#include "engine/base/log.h"
#include "engine/device/device.h"

namespace writescope::device {

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    Reset();
    data_ = std::exchange(other.data_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
    release_ = std::exchange(other.release_, nullptr);
    context_ = std::exchange(other.context_, nullptr);
  }
  return *this;
}

void Buffer::Reset() {
  if (release_ != nullptr) release_(context_, data_, size_bytes_);
  data_ = nullptr;
  size_bytes_ = 0;
  release_ = nullptr;
}

void AwaitIdle(std::initializer_list<Queue*> queues, std::string_view who) {
  for (Queue* queue : queues) {
    const Event last = queue->Record();
    absl::Status idle;
    do {
      idle = last.Wait(absl::Seconds(10));
      if (idle.ok()) break;
      Log(LogLevel::kError, "memory is to be freed while a queue works",
          {{"of", std::string(who)}, {"status", idle.ToString()}});
    } while (absl::IsDeadlineExceeded(idle));  // Else the queue is broken and does nothing more.
  }
}

double NowSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace writescope::device
