// The pace of the simulated link. A loaded machine can only make a copy slower than its pace, never
// faster; so too fast is an error at once, and too slow only when it is so again and again.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "engine/base/units.h"
#include "engine/device/cpu/cpu_device.h"

namespace writescope::device {
namespace {

constexpr double kTolerance = 0.15;
constexpr int kTries = 20;

struct Link {
  std::unique_ptr<CpuDevice> device;
  Buffer host;
  Buffer vram;
};

Link MakeLink(double pace) {
  Link link{.device = *CpuDevice::Create({.budget_bytes = 8 * kMiB, .link_bytes_per_s = pace}),
            .host = {},
            .vram = {}};
  link.host = *link.device->AllocateHost(4 * kMiB, HostMemory::kPageLocked, "host");
  link.vram = *link.device->AllocateDevice(4 * kMiB, "vram");
  return link;
}

// Seconds from the submission of `copies` copies to the queue's time after the last.
double CopySeconds(Link& link, Queue& queue, bool up, int copies, int64_t size_bytes) {
  double end_s = 0;
  const double start_s = NowSeconds();
  for (int i = 0; i < copies; ++i) {
    if (up) {
      queue.Copy(link.vram.data(), link.host.data(), size_bytes);
    } else {
      queue.Copy(link.host.data(), link.vram.data(), size_bytes);
    }
  }
  queue.RecordTime(&end_s);
  EXPECT_TRUE(queue.Record().Wait(absl::Seconds(30)).ok());
  return end_s - start_s;
}

// The best rate of several tries, as a part of the pace; tries no more once it is `enough`.
double BestRate(Link& link, Queue& queue, bool up, double pace, int copies, int64_t size_bytes,
                double enough = 1 - kTolerance) {
  double best = 0;
  for (int i = 0; i < kTries && best < enough; ++i) {
    const double seconds = CopySeconds(link, queue, up, copies, size_bytes);
    best = std::max(best, static_cast<double>(copies * size_bytes) / seconds / pace);
  }
  return best;
}

TEST(PacedLink, KeepsItsPaceBothWaysForSmallAndLargeCopies) {
  const double pace = 200e6;
  Link link = MakeLink(pace);
  for (const bool up : {true, false}) {
    Queue& queue = up ? link.device->upload() : link.device->download();
    for (const int64_t size_bytes : {16 * kKiB, 256 * kKiB, 4 * kMiB}) {
      const int copies = static_cast<int>(4 * kMiB / size_bytes);
      const double rate = BestRate(link, queue, up, pace, copies, size_bytes);
      EXPECT_GT(rate, 1 - kTolerance) << "copies of " << size_bytes << ", up " << up;
      EXPECT_LT(rate, 1 + kTolerance) << "copies of " << size_bytes << ", up " << up;
    }
  }
}

TEST(PacedLink, ChangesAtRunTime) {
  Link link = MakeLink(100e6);
  Queue& queue = link.device->upload();
  for (const double pace : {100e6, 25e6, 50e6}) {
    ASSERT_TRUE(link.device->SetLinkPace(pace).ok());
    for (const int64_t size_bytes : {64 * kKiB, 256 * kKiB}) {
      const double rate =
          BestRate(link, queue, true, pace, static_cast<int>(2 * kMiB / size_bytes), size_bytes);
      EXPECT_GT(rate, 1 - kTolerance) << pace;
      EXPECT_LT(rate, 1 + kTolerance) << pace;
    }
  }
  // Unpaced it is as fast as memory: far above any of these.
  ASSERT_TRUE(link.device->SetLinkPace(0).ok());
  EXPECT_GT(BestRate(link, queue, true, 100e6, 8, 256 * kKiB, 2), 2);
}

// Time in which the link had nothing to do is not saved up for a burst above the pace.
TEST(PacedLink, IdleTimeIsNotCredit) {
  const double pace = 100e6;
  Link link = MakeLink(pace);
  Queue& queue = link.device->upload();
  CopySeconds(link, queue, true, 1, 64 * kKiB);
  const double wait_until_s = NowSeconds() + 0.05;
  while (NowSeconds() < wait_until_s) {
  }
  for (const int64_t size_bytes : {16 * kKiB, 2 * kMiB}) {
    const double seconds = CopySeconds(link, queue, true, 1, size_bytes);
    EXPECT_GE(seconds, static_cast<double>(size_bytes) / pace * 0.99) << size_bytes;
  }
}

TEST(PacedLink, CopiesInsideTheDeviceAreNotPaced) {
  Link link = MakeLink(1e6);  // 4 s for what follows, were it the link's
  Queue& compute = link.device->compute();
  const double start_s = NowSeconds();
  for (int i = 0; i < 4; ++i) compute.Copy(link.vram.data() + kMiB, link.vram.data(), kMiB);
  ASSERT_TRUE(compute.Record().Wait(absl::Seconds(30)).ok());
  EXPECT_LT(NowSeconds() - start_s, 2);
}

}  // namespace
}  // namespace writescope::device
