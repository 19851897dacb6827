#include <chrono>
#include <utility>

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

double NowSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace writescope::device
