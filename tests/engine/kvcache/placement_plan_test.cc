#include "engine/kvcache/placement_plan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/support/seed.h"

namespace writescope::kvcache {
namespace {

using testing_support::TestSeed;

constexpr size_t At(RegionKind kind) { return static_cast<size_t>(kind); }

RegionFill Fill(std::array<int64_t, kNumRegions> capacity,
                std::array<int64_t, kNumRegions> available) {
  return {.capacity = capacity, .available = available};
}

TEST(DeviceQuota, WhatFitsGetsAllOfItAndMoreGetsAPart) {
  const RegionFill fill = Fill({15, 0, 45, 0}, {12, 0, 45, 0});  // Too small for a reserve
  const auto blocks = [&](int64_t expected) { return DeviceQuotaFor(expected, fill).blocks; };
  EXPECT_EQ(blocks(0), 0);
  EXPECT_EQ(blocks(11), 11);
  EXPECT_EQ(blocks(12), 12);
  EXPECT_EQ(blocks(13), 9);   // Three quarters of what is available
  EXPECT_EQ(blocks(60), 12);  // Its proportional part is 15: all there is
  EXPECT_EQ(DeviceQuotaFor(60, fill).keep_free, 0);
  EXPECT_EQ(DeviceQuotaFor(10, Fill({0, 0, 10, 0}, {0, 0, 10, 0})).blocks, 0);
  EXPECT_EQ(DeviceQuotaFor(10, Fill({0, 0, 0, 0}, {0, 0, 0, 0})).blocks, 0);
}

TEST(DeviceQuota, LongOnesLeaveAPartToShortOnes) {
  const std::array<int64_t, kNumRegions> capacity = {3200, 0, 8000, 0};
  const auto quota = [&](int64_t expected, int64_t available) {
    return DeviceQuotaFor(expected, Fill(capacity, {available, 0, 8000, 0}));
  };
  EXPECT_EQ(quota(50, 3200).blocks, 50);  // Half of the 100 blocks that are kept
  EXPECT_EQ(quota(50, 3200).keep_free, 0);
  EXPECT_EQ(quota(51, 3200).blocks, 51);
  EXPECT_EQ(quota(51, 3200).keep_free, 100);
  EXPECT_EQ(quota(3100, 3200).blocks, 3100);
  EXPECT_EQ(quota(3101, 3200).blocks, 2325);
  EXPECT_EQ(quota(51, 90).blocks, 0);
  EXPECT_EQ(quota(50, 90).blocks, 50);
  RegionKind kind;
  const auto place = [&](const DeviceQuota& device_quota, int64_t available) {
    EXPECT_TRUE(ChooseRegion({.device_quota = device_quota},
                             Fill(capacity, {available, 0, 8000, 0}), &kind));
    return kind;
  };
  // A quota of long ago does not reach into what is kept.
  EXPECT_EQ(place(quota(3100, 3200), 101), RegionKind::kDevice);
  EXPECT_EQ(place(quota(3100, 3200), 100), RegionKind::kSwing);
  EXPECT_EQ(place(quota(50, 100), 1), RegionKind::kDevice);
  EXPECT_EQ(place(quota(50, 100), 0), RegionKind::kSwing);
}

TEST(ChooseRegion, DeviceWithinTheQuotaOnly) {
  const RegionFill fill = Fill({10, 10, 10, 10}, {5, 10, 10, 10});
  RegionKind kind;
  ASSERT_TRUE(ChooseRegion({.device_blocks = 2, .device_quota = {.blocks = 3}}, fill, &kind));
  EXPECT_EQ(kind, RegionKind::kDevice);
  ASSERT_TRUE(ChooseRegion({.device_blocks = 3, .device_quota = {.blocks = 3}}, fill, &kind));
  EXPECT_NE(kind, RegionKind::kDevice);
  // Within the quota but full: spilled, not refused.
  ASSERT_TRUE(ChooseRegion({.device_blocks = 0, .device_quota = {.blocks = 3}},
                           Fill({10, 10, 10, 10}, {0, 10, 10, 10}), &kind));
  EXPECT_NE(kind, RegionKind::kDevice);
}

TEST(ChooseRegion, SpilledBlocksKeepTheProportionsOfTheRegions) {
  const std::array<int64_t, kNumRegions> capacity = {0, 50, 100, 50};
  std::array<int64_t, kNumRegions> available = capacity;
  std::array<double, kNumRegions> used{};
  for (int i = 1; i <= 200; ++i) {
    RegionKind kind;
    ASSERT_TRUE(ChooseRegion({}, Fill(capacity, available), &kind));
    if (i == 1) {
      EXPECT_EQ(kind, RegionKind::kSwing);  // Worth most to the balance
    }
    --available[At(kind)];
    ++used[At(kind)];
    for (const RegionKind region : {RegionKind::kStream, RegionKind::kSwing, RegionKind::kHost}) {
      const double target = static_cast<double>(i * capacity[At(region)]) / 200.0;
      ASSERT_LE(std::fabs(used[At(region)] - target), 1.0) << RegionName(region) << " at " << i;
    }
  }
  RegionKind kind;
  EXPECT_FALSE(ChooseRegion({}, Fill(capacity, available), &kind));
}

TEST(ChooseRegion, FurthestBelowItsTargetCatchesUp) {
  // Half of swing was freed by a departure: new blocks go there until it is level again.
  std::array<int64_t, kNumRegions> available = {0, 20, 75, 20};
  for (int i = 0; i < 20; ++i) {
    RegionKind kind;
    ASSERT_TRUE(ChooseRegion({}, Fill({0, 50, 100, 50}, available), &kind));
    EXPECT_EQ(kind, RegionKind::kSwing) << i;
    --available[At(kind)];
  }
}

TEST(ChooseRegion, NoHostBytesWhileLittleIsSpilled) {
  const std::array<int64_t, kNumRegions> capacity = {0, 10, 10, 80};
  std::array<int64_t, kNumRegions> available = capacity;
  const PlacementRequest request = {.host_after_spilled_blocks = 12};
  for (int i = 0; i < 12; ++i) {
    RegionKind kind;
    ASSERT_TRUE(ChooseRegion(request, Fill(capacity, available), &kind));
    ASSERT_NE(kind, RegionKind::kHost) << i;
    --available[At(kind)];
  }
  RegionKind kind;
  ASSERT_TRUE(ChooseRegion(request, Fill(capacity, available), &kind));
  EXPECT_EQ(kind, RegionKind::kHost);  // 80 % of the capacity and nothing in it yet
  // Below the threshold, but nothing else has room: better there than a refusal.
  ASSERT_TRUE(ChooseRegion(request, Fill({0, 2, 2, 80}, {0, 0, 0, 80}), &kind));
  EXPECT_EQ(kind, RegionKind::kHost);
}

TEST(ChooseRegion, BeyondTheQuotaTheDeviceIsTheLastResort) {
  RegionKind kind;
  ASSERT_TRUE(ChooseRegion({.device_blocks = 9, .device_quota = {.blocks = 3}},
                           Fill({10, 4, 4, 4}, {1, 0, 0, 0}), &kind));
  EXPECT_EQ(kind, RegionKind::kDevice);
}

TEST(ChooseRegion, NeverAFullRegionAndRefusesOnlyWhenAllAre) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 20000; ++round) {
    RegionFill fill;
    int64_t total = 0;
    for (size_t i = 0; i < kNumRegions; ++i) {
      fill.capacity[i] = static_cast<int64_t>(random() % 20);
      fill.available[i] =
          random() % 2 == 0
              ? 0
              : static_cast<int64_t>(random() % static_cast<uint64_t>(fill.capacity[i] + 1));
      total += fill.available[i];
    }
    const PlacementRequest request = {
        .device_blocks = static_cast<int64_t>(random() % 10),
        .device_quota = {.blocks = static_cast<int64_t>(random() % 10)},
        .host_after_spilled_blocks = static_cast<int64_t>(random() % 30)};
    RegionKind kind;
    const bool found = ChooseRegion(request, fill, &kind);
    ASSERT_EQ(found, total > 0);
    if (found) {
      ASSERT_GT(fill.available[At(kind)], 0);
    }
    const int64_t expected = static_cast<int64_t>(random() % 100);
    const int64_t quota = DeviceQuotaFor(expected, fill).blocks;
    ASSERT_GE(quota, 0);
    ASSERT_LE(quota, expected);
    ASSERT_LE(quota, fill.available[At(RegionKind::kDevice)]);
  }
}

TEST(DivideHostBlocks, SumsUpAndSpansTheInterval) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 5000; ++round) {
    const int64_t blocks = static_cast<int64_t>(random() % 100000);
    const double low = static_cast<double>(random() % 1001) / 1000;
    const double high = low + (1 - low) * static_cast<double>(random() % 1001) / 1000;
    const auto divided = DivideHostBlocks(blocks, low, high);
    const int64_t stream = divided[At(RegionKind::kStream)];
    const int64_t swing = divided[At(RegionKind::kSwing)];
    const int64_t host = divided[At(RegionKind::kHost)];
    ASSERT_EQ(divided[At(RegionKind::kDevice)], 0);
    ASSERT_EQ(stream + swing + host, blocks);
    ASSERT_GE(stream, 0);
    ASSERT_GE(swing, 0);
    ASSERT_GE(host, 0);
    // Every share of the interval can be had when all is full.
    const double total = static_cast<double>(blocks);
    ASSERT_LE(static_cast<double>(host), low * total + 1e-6);
    ASSERT_GE(static_cast<double>(host + swing), high * total - 1e-6);
    // And no more is made swing than it takes: a block at each end for rounding.
    ASSERT_LE(static_cast<double>(swing), (high - low) * total + 2);
  }
  EXPECT_EQ(DivideHostBlocks(100, 0.3, 0.75), (std::array<int64_t, kNumRegions>{0, 25, 45, 30}));
  EXPECT_EQ(DivideHostBlocks(100, 0, 1), (std::array<int64_t, kNumRegions>{0, 0, 100, 0}));
}

}  // namespace
}  // namespace writescope::kvcache
