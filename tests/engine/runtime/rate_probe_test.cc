// What the probes at start and of the doctor make of a link: its rates, and that one which does not
// copy is an error and no rate.
#include "engine/runtime/rate_probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "engine/device/cpu/cpu_device.h"
#include "engine/runtime/machine_probe.h"
#include "tests/support/faulty_device.h"

namespace writescope::runtime {
namespace {

using ::testing::HasSubstr;

constexpr KvGeometry kGeometry = {.num_kv_heads = 1, .k_dim = 32, .v_dim = 32};

std::unique_ptr<testing::FaultyDevice> MakeDevice(double link_bytes_per_s) {
  auto inner = device::CpuDevice::Create({.budget_bytes = 8 << 20,
                                          .host_budget_bytes = 8 << 20,
                                          .compute_threads = 1,
                                          .link_bytes_per_s = link_bytes_per_s});
  EXPECT_TRUE(inner.ok()) << inner.status();
  return std::make_unique<testing::FaultyDevice>(*std::move(inner));
}

TEST(RateProbeTest, TheLinksRateIsItsPace) {
  const auto device = MakeDevice(1e8);
  const auto profile = ProbeRates(*device, {.geometry = kGeometry, .seconds = 0.05});
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_TRUE(profile->Validate().ok());
  EXPECT_TRUE(profile->measured);
  // A pace is kept from above; a busy machine may be late.
  EXPECT_LT(profile->rates.link_alone, 1.2e8);
  EXPECT_GT(profile->rates.link_alone, 1e7);
  EXPECT_LE(profile->rates.link_with_cpu, profile->rates.link_alone);
  EXPECT_LE(profile->rates.cpu_with_link, profile->rates.cpu_alone);
  EXPECT_EQ(device->device_used_bytes(), 0);
}

TEST(RateProbeTest, ALinkThatDoesNotCopyIsAnError) {
  const auto device = MakeDevice(0);
  device->upload_is_broken = true;
  const auto profile = ProbeRates(*device, {.geometry = kGeometry, .seconds = 0.01});
  EXPECT_EQ(profile.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(profile.status().message()), HasSubstr("rate probe: copies of 262144"));
  const auto copies = MeasureCopies(
      *device,
      {.geometry = kGeometry, .host_bytes = 64 << 10, .device_bytes = 64 << 10, .seconds = 0.01});
  EXPECT_EQ(copies.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(copies.status().message()), HasSubstr("copies of 16384 bytes"));
  EXPECT_EQ(device->device_used_bytes(), 0);
}

}  // namespace
}  // namespace writescope::runtime
