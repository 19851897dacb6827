// How much of the end of a layer's list the link leaves to the CPU, so that both end together:
// pure.
//
// Claims meet in the middle of a list, but what the link claims last still has to come over and be
// attended to on the device, when the CPU is done with its own last claim. How long that takes is
// learnt from the steps.
#pragma once

#include <algorithm>
#include <cstdint>

namespace writescope::attention {

class CpuReserve {
 public:
  // More would not be for want of this.
  static constexpr int64_t kMaxBytes = int64_t{16} << 20;

  int64_t bytes() const { return bytes_; }

  // Of a step: by how much later the device had attended to the last of a layer than the CPU, in
  // the mean of its layers, and what either side needed for a byte.
  void Learn(double late_s, double cpu_seconds_a_byte, double link_seconds_a_byte) {
    const double seconds_a_byte = cpu_seconds_a_byte + link_seconds_a_byte;
    if (!(seconds_a_byte > 0)) return;
    // So much less for the link is as much more for the CPU. Half the way, since steps differ.
    constexpr double kStep = 0.5;
    const double wanted = static_cast<double>(bytes_) + kStep * late_s / seconds_a_byte;
    bytes_ = static_cast<int64_t>(std::clamp(wanted, 0.0, static_cast<double>(kMaxBytes)));
  }

 private:
  int64_t bytes_ = 0;
};

}  // namespace writescope::attention
