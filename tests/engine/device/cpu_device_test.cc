#include "engine/device/cpu/cpu_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/time/clock.h"
#include "engine/base/units.h"

namespace writescope::device {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::unique_ptr<CpuDevice> MakeDevice(const CpuDeviceOptions& options) {
  auto device = CpuDevice::Create(options);
  EXPECT_TRUE(device.ok()) << device.status();
  return *std::move(device);
}

bool AllZero(const Buffer& buffer) {
  return std::all_of(buffer.bytes().begin(), buffer.bytes().end(),
                     [](std::byte b) { return b == std::byte{0}; });
}

TEST(CpuDevice, RefusesWrongOptionsWithNumbers) {
  const auto error = [](const CpuDeviceOptions& options) {
    const auto device = CpuDevice::Create(options);
    EXPECT_TRUE(absl::IsInvalidArgument(device.status())) << device.status();
    return std::string(device.status().message());
  };
  EXPECT_THAT(error({.budget_bytes = 0}), HasSubstr("budget of 0 bytes"));
  EXPECT_THAT(error({.budget_bytes = -5}), HasSubstr("-5"));
  EXPECT_THAT(error({.budget_bytes = 1, .compute_threads = 0}), HasSubstr("0 compute threads"));
  EXPECT_THAT(error({.budget_bytes = 1, .link_bytes_per_s = -1}), HasSubstr("-1"));
  EXPECT_THAT(error({.budget_bytes = 1, .link_bytes_per_s = std::nan("")}), HasSubstr("nan"));
}

TEST(CpuDevice, BudgetCountsAndRefusesWithNumbers) {
  const auto device = MakeDevice({.budget_bytes = 64 * kKiB});
  EXPECT_EQ(device->device_budget_bytes(), 64 * kKiB);
  EXPECT_EQ(device->device_used_bytes(), 0);
  auto first = device->AllocateDevice(40 * kKiB + 1, "first");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->size_bytes(), 40 * kKiB + 1);
  EXPECT_EQ(device->device_used_bytes(), 44 * kKiB);  // Whole pages
  const auto second = device->AllocateDevice(24 * kKiB, "weights of layer 3");
  ASSERT_TRUE(absl::IsResourceExhausted(second.status())) << second.status();
  EXPECT_THAT(std::string(second.status().message()),
              AllOf(HasSubstr("weights of layer 3"), HasSubstr("24576"), HasSubstr("20480"),
                    HasSubstr("65536")));
  EXPECT_TRUE(absl::IsInvalidArgument(device->AllocateDevice(0, "nothing").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(device->AllocateDevice(-4096, "less").status()));
  first->Reset();
  EXPECT_EQ(device->device_used_bytes(), 0);
  EXPECT_TRUE(device->AllocateDevice(64 * kKiB, "all of it").ok());
}

TEST(CpuDevice, HostMemoryHasItsOwnBudget) {
  const auto device = MakeDevice({.budget_bytes = 16 * kKiB, .host_budget_bytes = 32 * kKiB});
  auto pinned = device->AllocateHost(32 * kKiB, HostMemory::kPageLocked, "swing");
  ASSERT_TRUE(pinned.ok()) << pinned.status();
  EXPECT_EQ(device->device_used_bytes(), 0);
  const auto more = device->AllocateHost(1, HostMemory::kPageable, "one byte more");
  ASSERT_TRUE(absl::IsResourceExhausted(more.status()));
  EXPECT_THAT(std::string(more.status().message()),
              AllOf(HasSubstr("host memory"), HasSubstr("one byte more"), HasSubstr("32768")));
  const auto free_device = MakeDevice({.budget_bytes = kKiB});
  EXPECT_TRUE(free_device->AllocateHost(8 * kMiB, HostMemory::kPageable, "no limit").ok());
}

TEST(CpuDevice, MemoryIsZeroAgainAfterUse) {
  const auto device = MakeDevice({.budget_bytes = kMiB});
  for (int round = 0; round < 3; ++round) {
    auto buffer = device->AllocateDevice(kMiB, "all");
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_TRUE(AllZero(*buffer));
    std::memset(buffer->data(), 0xab, static_cast<size_t>(buffer->size_bytes()));
    auto host = device->AllocateHost(100 * kKiB, HostMemory::kPageLocked, "host");
    ASSERT_TRUE(host.ok());
    EXPECT_TRUE(AllZero(*host));
    std::memset(host->data(), 0xcd, static_cast<size_t>(host->size_bytes()));
  }
}

TEST(CpuDevice, BufferMovesItsMemory) {
  const auto device = MakeDevice({.budget_bytes = kMiB});
  Buffer a = *device->AllocateDevice(8 * kKiB, "a");
  Buffer b = *device->AllocateDevice(4 * kKiB, "b");
  std::byte* data = a.data();
  b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(device->device_used_bytes(), 8 * kKiB);
  Buffer c(std::move(b));
  EXPECT_EQ(c.bytes().size(), 8u * kKiB);
  c.Reset();
  c.Reset();
  EXPECT_EQ(device->device_used_bytes(), 0);
}

TEST(CpuDevice, LinkPaceIsValidated) {
  const auto device = MakeDevice({.budget_bytes = kMiB, .link_bytes_per_s = 1e9});
  EXPECT_TRUE(device->link().simulated);
  EXPECT_EQ(device->link().pace_bytes_per_s, 1e9);
  for (const double wrong : {-1.0, std::nan(""), std::numeric_limits<double>::infinity(),
                             -std::numeric_limits<double>::infinity()}) {
    EXPECT_TRUE(absl::IsInvalidArgument(device->SetLinkPace(wrong))) << wrong;
    EXPECT_EQ(device->link().pace_bytes_per_s, 1e9);
  }
  EXPECT_TRUE(device->SetLinkPace(0).ok());
  EXPECT_EQ(device->link().pace_bytes_per_s, 0);
  EXPECT_TRUE(device->SetLinkPace(2.5e9).ok());
  EXPECT_EQ(device->link().pace_bytes_per_s, 2.5e9);
}

TEST(CpuDevice, TeamServesClosuresOfTheComputeQueue) {
  const auto device = MakeDevice({.budget_bytes = kMiB, .compute_threads = 3});
  EXPECT_EQ(device->team().num_threads(), 3);
  std::atomic<int> items{0};
  device->compute().Launch([&] { device->team().Run(100, [&](int64_t, int) { ++items; }); });
  ASSERT_TRUE(device->compute().Record().Wait(absl::Seconds(10)).ok());
  EXPECT_EQ(items, 100);
}

// Queues wait for one another while the device goes down: nobody may look at one that is gone.
TEST(CpuDevice, EndsWithWorkUnderWay) {
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> done{0};
    {
      const auto device = MakeDevice({.budget_bytes = kMiB});
      for (int i = 0; i < 3; ++i) {
        device->compute().Launch([&] {
          absl::SleepFor(absl::Microseconds(300));
          ++done;
        });
        device->upload().WaitFor(device->compute().Record());
        device->download().WaitFor(device->upload().Record());
        device->compute().WaitFor(device->download().Record());
      }
    }
    EXPECT_EQ(done, 3);
  }
}

}  // namespace
}  // namespace writescope::device
