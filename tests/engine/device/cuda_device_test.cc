#include "engine/device/cuda/cuda_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "engine/base/units.h"
#include "tests/support/gpu.h"

namespace writescope::device {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<CudaDevice> Make(FlagWaits waits = FlagWaits::kAuto) {
  auto device = CudaDevice::Create({.budget_bytes = 4 * kGiB, .flag_waits = waits});
  EXPECT_TRUE(device.ok()) << device.status();
  return device.ok() ? *std::move(device) : nullptr;
}

TEST(CudaDeviceTest, WithoutOneTheErrorSaysSo) {
  const auto device = CudaDevice::Create({.ordinal = 99, .budget_bytes = kGiB});
  ASSERT_FALSE(device.ok());
  EXPECT_EQ(device.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(device.status().message(), HasSubstr("CUDA device"));
}

TEST(CudaDeviceTest, BytesGoUpAndComeBack) {
  SKIP_WITHOUT_GPU();
  auto device = Make();
  ASSERT_NE(device, nullptr);
  constexpr int64_t kBytes = 5 * kMiB + 17;
  Buffer there = *device->AllocateDevice(kBytes, "there");
  Buffer here = *device->AllocateHost(2 * kBytes, HostMemory::kPageLocked, "here");
  for (int64_t i = 0; i < kBytes; ++i) here.data()[i] = static_cast<std::byte>(i * 7);
  device->upload().Copy(there.data(), here.data(), kBytes);
  device->download().WaitFor(device->upload().Record());
  device->download().Copy(here.data() + kBytes, there.data(), kBytes);
  ASSERT_TRUE(device->download().Record().Wait(absl::Seconds(10)).ok());
  EXPECT_EQ(std::memcmp(here.data(), here.data() + kBytes, kBytes), 0);
}

TEST(CudaDeviceTest, ZeroRowsClearsRowsAndNothingElse) {
  SKIP_WITHOUT_GPU();
  auto device = Make();
  ASSERT_NE(device, nullptr);
  Buffer there = *device->AllocateDevice(4096, "there");
  Buffer here = *device->AllocateHost(4096, HostMemory::kPageLocked, "here");
  std::memset(here.data(), 0x5a, 4096);
  CudaQueue& queue = device->compute();
  queue.Copy(there.data(), here.data(), 4096);
  queue.ZeroRows(there.data() + 8, 4, 64, 5);
  queue.Copy(here.data(), there.data(), 4096);
  ASSERT_TRUE(queue.Record().Wait(absl::Seconds(10)).ok());
  for (int i = 0; i < 4096; ++i) {
    const bool cleared = i % 64 >= 8 && i % 64 < 12 && i / 64 < 5;
    ASSERT_EQ(here.data()[i], cleared ? std::byte{0} : std::byte{0x5a}) << i;
  }
}

TEST(CudaDeviceTest, AllocationsBeyondTheBudgetAreRefusedWithTheNumbers) {
  SKIP_WITHOUT_GPU();
  auto device = Make();
  ASSERT_NE(device, nullptr);
  const int64_t before = device->device_used_bytes();
  EXPECT_GT(before, 0);
  const auto refused = device->AllocateDevice(4 * kGiB, "too much");
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.status().message(), HasSubstr("too much"));
  {
    Buffer some = *device->AllocateDevice(kMiB, "some");
    EXPECT_GE(device->device_used_bytes(), before + kMiB);
  }
  EXPECT_EQ(device->device_used_bytes(), before);
}

TEST(CudaDeviceTest, FlagsCrossBothWays) {
  SKIP_WITHOUT_GPU();
  for (const FlagWaits waits : {FlagWaits::kStream, FlagWaits::kCaller}) {
    auto device = Make(waits);
    ASSERT_NE(device, nullptr);
    Buffer memory = *device->AllocateHost(4096, HostMemory::kPageLocked, "flags");
    auto* ready = new (memory.data()) std::atomic<uint64_t>(0);
    auto* done = new (memory.data() + 64) std::atomic<uint64_t>(0);
    std::thread cpu([&] {
      for (uint64_t step = 1; step <= 100; ++step) {
        while (ready->load(std::memory_order_acquire) < step) std::this_thread::yield();
        done->store(step, std::memory_order_release);
      }
    });
    CudaQueue& queue = device->compute();
    for (uint64_t step = 1; step <= 100; ++step) {
      queue.SetFlag(ready, step);
      queue.WaitFlag(done, step, absl::Seconds(5), nullptr);
    }
    EXPECT_TRUE(queue.Record().Wait(absl::Seconds(10)).ok());
    cpu.join();
    EXPECT_TRUE(queue.TakeError().ok());
  }
}

TEST(CudaDeviceTest, FlagThatNeverComesEndsTheWaitWithAnErrorAndTheQueueServesOn) {
  SKIP_WITHOUT_GPU();
  for (const FlagWaits waits : {FlagWaits::kStream, FlagWaits::kCaller}) {
    auto device = Make(waits);
    ASSERT_NE(device, nullptr);
    Buffer memory = *device->AllocateHost(4096, HostMemory::kPageLocked, "flags");
    auto* never = new (memory.data()) std::atomic<uint64_t>(0);
    CudaQueue& queue = device->compute();
    const double began_s = NowSeconds();
    queue.WaitFlag(never, 1, absl::Milliseconds(200), nullptr);
    queue.WaitFlag(never, 1, absl::Seconds(60),
                   nullptr);  // After the first this one does not wait.
    ASSERT_TRUE(queue.Record().Wait(absl::Seconds(10)).ok());
    EXPECT_LT(NowSeconds() - began_s, 5);
    EXPECT_TRUE(queue.failed());
    const absl::Status error = queue.TakeError();
    EXPECT_EQ(error.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_FALSE(queue.failed());
    never->store(1);
    queue.WaitFlag(never, 1, absl::Seconds(5), nullptr);
    EXPECT_TRUE(queue.Record().Wait(absl::Seconds(10)).ok());
    EXPECT_TRUE(queue.TakeError().ok());
  }
}

TEST(CudaDeviceTest, AWaitTellsWhenItSawTheFlag) {
  SKIP_WITHOUT_GPU();
  bool is_serialised = false;
  {
    const auto device = Make();
    ASSERT_NE(device, nullptr);
    is_serialised = device->flag_waits() == FlagWaits::kCaller;
  }
  for (const FlagWaits waits : {FlagWaits::kStream, FlagWaits::kCaller}) {
    auto device = Make(waits);
    ASSERT_NE(device, nullptr);
    Buffer memory = *device->AllocateHost(4096, HostMemory::kPageLocked, "flags");
    auto* flag = new (memory.data()) std::atomic<uint64_t>(0);
    CudaQueue& queue = device->compute();
    for (uint64_t step = 1; step <= 20; ++step) {
      double set_s = 0;
      WaitTimes times;
      std::thread cpu([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        set_s = NowSeconds();
        flag->store(step, std::memory_order_release);
      });
      const double submitted_s = NowSeconds();
      queue.WaitFlag(flag, step, absl::Seconds(5), &times);
      EXPECT_TRUE(queue.Record().Wait(absl::Seconds(10)).ok());
      cpu.join();
      // Under a tool events have times of their own.
      if (!is_serialised) {
        EXPECT_GT(times.began_s, submitted_s - 1e-4);
        EXPECT_LT(times.began_s, submitted_s + 1e-3);
      }
      EXPECT_GT(times.seen_s, set_s - 1e-4);
      EXPECT_LT(times.seen_s, set_s + 2e-3);
    }
    // One that gives up tells when it did.
    WaitTimes gave_up;
    const double before_s = NowSeconds();
    queue.WaitFlag(flag, 1000, absl::Milliseconds(50), &gave_up);
    EXPECT_TRUE(queue.Record().Wait(absl::Seconds(10)).ok());
    EXPECT_GT(gave_up.seen_s, before_s + 0.045);
    EXPECT_LT(gave_up.seen_s, NowSeconds() + 1e-4);
    EXPECT_FALSE(queue.TakeError().ok());
  }
}

TEST(CudaDeviceTest, TimesAreOnTheHostsClock) {
  SKIP_WITHOUT_GPU();
  auto device = Make();
  ASSERT_NE(device, nullptr);
  Buffer there = *device->AllocateDevice(64 * kMiB, "there");
  Buffer here = *device->AllocateHost(64 * kMiB, HostMemory::kPageLocked, "here");
  CudaQueue& queue = device->upload();
  for (int i = 0; i < 3; ++i) {
    double start_s = 0, end_s = 0;
    const double before_s = NowSeconds();
    queue.RecordTime(&start_s);
    queue.Copy(there.data(), here.data(), 64 * kMiB);
    queue.RecordTime(&end_s);
    ASSERT_TRUE(queue.Record().Wait(absl::Seconds(10)).ok());
    const double after_s = NowSeconds();
    EXPECT_GE(start_s, before_s - 1e-4);
    EXPECT_LE(end_s, after_s + 1e-4);
    EXPECT_GT(end_s - start_s, 0.5e-3);  // 64 MiB at no more than 128 GB/s
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
  }
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// What follows each other does so in the times that are told, those of events, of waits and of the
// host. The bounds leave no room for clocks that are 5 us apart.
TEST(CudaDeviceTest, TimesOfEventsOfWaitsAndOfTheHostAgreeToMicroseconds) {
  SKIP_WITHOUT_GPU();
  auto device = Make();
  ASSERT_NE(device, nullptr);
  if (device->flag_waits() != FlagWaits::kStream) GTEST_SKIP() << "the GPU is serialised";
  constexpr int64_t kBusyBytes = 512 * kMiB;
  Buffer there = *device->AllocateDevice(kBusyBytes, "there");
  Buffer memory = *device->AllocateHost(4096, HostMemory::kPageLocked, "flags");
  auto* to_host = new (memory.data()) std::atomic<uint64_t>(0);
  auto* to_device = new (memory.data() + 64) std::atomic<uint64_t>(0);
  CudaQueue& queue = device->compute();
  std::vector<double> out_us, begun_us, back_us, end_us;
  for (uint64_t step = 1; step <= 60; ++step) {
    double published_s = 0, ended_s = 0;
    WaitTimes wait;
    queue.Zero(there.data(), kBusyBytes);  // All that follows is submitted when it is done.
    queue.RecordTime(&published_s);
    queue.SetFlag(to_host, step);
    queue.WaitFlag(to_device, step, absl::Seconds(5), &wait);
    queue.RecordTime(&ended_s);
    const Event end = queue.Record();
    while (to_host->load(std::memory_order_acquire) < step) {
    }
    const double arrived_s = NowSeconds();
    while (NowSeconds() < arrived_s + 50e-6) {
    }
    const double set_s = NowSeconds();
    to_device->store(step, std::memory_order_release);
    ASSERT_TRUE(end.Wait(absl::Seconds(10)).ok());
    out_us.push_back(1e6 * (arrived_s - published_s));
    begun_us.push_back(1e6 * (wait.began_s - published_s));
    back_us.push_back(1e6 * (wait.seen_s - set_s));
    end_us.push_back(1e6 * (ended_s - wait.seen_s));
    // Over several bases.
    if (step % 15 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(600));
  }
  EXPECT_GT(Median(out_us), 0);
  EXPECT_LT(Median(out_us), 5);
  EXPECT_GT(Median(begun_us), 0);
  EXPECT_LT(Median(begun_us), 20);  // A flag is stored before.
  EXPECT_GT(Median(back_us), 0);
  EXPECT_LT(Median(back_us), 5);
  EXPECT_GT(Median(end_us), 0);
}

TEST(CudaDeviceTest, ArgumentsOutliveTheirSubmission) {
  SKIP_WITHOUT_GPU();
  auto device = Make();
  ASSERT_NE(device, nullptr);
  Buffer there = *device->AllocateDevice(4 * kMiB, "there");
  Buffer here = *device->AllocateHost(4 * kMiB, HostMemory::kPageLocked, "here");
  CudaQueue& queue = device->compute();
  constexpr int kRounds = 64;
  constexpr int64_t kBytes = 300 * 1000;  // Several times round the ring
  for (int round = 0; round < kRounds; ++round) {
    std::byte* arguments = queue.StageArguments(kBytes);
    ASSERT_EQ(reinterpret_cast<uintptr_t>(arguments) % 64, 0u);
    std::memset(arguments, round + 1, kBytes);
    queue.Copy(there.data() + round * 64, arguments + kBytes - 64, 64);
  }
  queue.Copy(here.data(), there.data(), kRounds * 64);
  ASSERT_TRUE(queue.Record().Wait(absl::Seconds(10)).ok());
  for (int i = 0; i < kRounds * 64; ++i) {
    ASSERT_EQ(here.data()[i], static_cast<std::byte>(i / 64 + 1)) << i;
  }
}

}  // namespace
}  // namespace writescope::device
