#include "engine/kvcache/region.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "engine/base/units.h"
#include "engine/device/cpu/cpu_device.h"
#include "tests/support/seed.h"

namespace writescope::kvcache {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing_support::TestSeed;

constexpr KvGeometry kGeometry = {
    .num_kv_heads = 1, .k_dim = 32, .v_dim = 32, .dtype = KvDtype::kBf16};

class RegionTest : public ::testing::Test {
 protected:
  Region Make(RegionKind kind, int num_blocks, int num_layers = 2) {
    auto region = Region::Create(kind, kGeometry, num_layers, num_blocks, *device_);
    EXPECT_TRUE(region.ok()) << region.status();
    return *std::move(region);
  }
  std::unique_ptr<device::CpuDevice> device_ =
      *device::CpuDevice::Create({.budget_bytes = 4 * kMiB, .host_budget_bytes = 8 * kMiB});
};

TEST_F(RegionTest, PlanesOfLayersDoNotOverlap) {
  const Region region = Make(RegionKind::kSwing, 5, 3);
  EXPECT_EQ(region.block_bytes(), kGeometry.block_bytes());
  EXPECT_EQ(static_cast<int64_t>(region.memory().size()), 15 * kGeometry.block_bytes());
  std::set<const std::byte*> starts;
  for (int layer = 0; layer < 3; ++layer) {
    for (int index = 0; index < 5; ++index) {
      const std::byte* at = region.Address(layer, index);
      EXPECT_EQ((at - region.memory().data()) % kGeometry.block_bytes(), 0);
      EXPECT_TRUE(starts.insert(at).second);
      if (index > 0) {
        EXPECT_EQ(at, region.Address(layer, index - 1) + kGeometry.block_bytes());
      }
    }
  }
  EXPECT_EQ(*starts.begin(), region.memory().data());
  EXPECT_EQ(*starts.rbegin() + kGeometry.block_bytes(),
            region.memory().data() + region.memory().size());
}

TEST_F(RegionTest, TakesTheRightKindOfMemory) {
  const int64_t bytes = 10 * 2 * kGeometry.block_bytes();
  const Region device_region = Make(RegionKind::kDevice, 10);
  EXPECT_EQ(device_->device_used_bytes(), bytes);
  for (const RegionKind kind : {RegionKind::kStream, RegionKind::kSwing, RegionKind::kHost}) {
    const Region region = Make(kind, 10);
    EXPECT_EQ(device_->device_used_bytes(), bytes) << RegionName(kind);
  }
  const Region none = Make(RegionKind::kDevice, 0);
  EXPECT_EQ(device_->device_used_bytes(), bytes);
  EXPECT_EQ(none.free_blocks(), 0);
  const auto too_large = Region::Create(RegionKind::kHost, kGeometry, 1000, 1000, *device_);
  ASSERT_TRUE(absl::IsResourceExhausted(too_large.status()));
  EXPECT_THAT(std::string(too_large.status().message()),
              AllOf(HasSubstr("KV region host"), HasSubstr("8388608")));
}

TEST_F(RegionTest, OneSequenceLiesInOneRun) {
  Region region = Make(RegionKind::kSwing, 50);
  int previous = -1;
  for (int i = 0; i < 50; ++i) {
    const int index = region.Allocate(previous);
    ASSERT_EQ(index, previous + 1);
    previous = index;
  }
  EXPECT_EQ(region.free_blocks(), 0);
  EXPECT_EQ(region.Allocate(previous), -1);
  EXPECT_EQ(region.Allocate(-1), -1);
}

// Sequences that grow in turns must not chop one another's runs to pieces.
TEST_F(RegionTest, SequencesThatGrowInTurnsKeepLongRuns) {
  Region region = Make(RegionKind::kSwing, 256);
  constexpr int kSequences = 4;
  std::vector<std::vector<int>> blocks(kSequences);
  for (int i = 0; i < 32; ++i) {
    for (std::vector<int>& of : blocks) {
      of.push_back(region.Allocate(of.empty() ? -1 : of.back()));
      ASSERT_GE(of.back(), 0);
    }
  }
  for (const std::vector<int>& of : blocks) {
    int runs = 1;
    for (size_t i = 1; i < of.size(); ++i) runs += of[i] != of[i - 1] + 1;
    EXPECT_EQ(runs, 1);
  }
}

TEST_F(RegionTest, FreedNeighboursMerge) {
  Region region = Make(RegionKind::kSwing, 8);
  for (int i = 0; i < 8; ++i) ASSERT_EQ(region.Allocate(i - 1), i);
  for (const int index : {2, 4, 3}) region.Free(index);
  EXPECT_EQ(region.free_blocks(), 3);
  // One extent again: what begins in it can go on to its end.
  EXPECT_EQ(region.Allocate(1), 2);
  EXPECT_EQ(region.Allocate(2), 3);
  EXPECT_EQ(region.Allocate(3), 4);
  EXPECT_EQ(region.Allocate(4), -1);
}

TEST_F(RegionTest, FreeingWhatIsFreeEndsTheProcess) {
  Region region = Make(RegionKind::kSwing, 4);
  ASSERT_EQ(region.Allocate(-1), 0);
  EXPECT_DEATH(region.Free(2), "freed twice");
  EXPECT_DEATH(region.Free(4), "block 4 of 4");
  EXPECT_DEATH(region.Free(-1), "block -1 of 4");
  region.Free(0);
  EXPECT_DEATH(region.Free(0), "freed twice");
}

TEST_F(RegionTest, RandomAgainstASetOfFreeBlocks) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 20; ++round) {
    const int capacity = 1 + static_cast<int>(random() % 60);
    Region region = Make(RegionKind::kSwing, capacity, 1);
    std::set<int> free;
    for (int i = 0; i < capacity; ++i) free.insert(i);
    std::vector<int> used;
    for (int step = 0; step < 600; ++step) {
      const bool allocate = used.empty() || random() % 100 < (step % 200 < 100 ? 70 : 30);
      if (allocate) {
        const int previous = used.empty() || random() % 3 == 0 ? -1 : used[random() % used.size()];
        const int index = region.Allocate(previous);
        if (free.empty()) {
          ASSERT_EQ(index, -1);
        } else {
          ASSERT_EQ(free.count(index), 1u) << "block " << index << " is in use";
          if (previous >= 0 && free.count(previous + 1) != 0) {
            ASSERT_EQ(index, previous + 1);
          }
          free.erase(index);
          used.push_back(index);
        }
      } else {
        std::swap(used[random() % used.size()], used.back());
        region.Free(used.back());
        free.insert(used.back());
        used.pop_back();
      }
      ASSERT_EQ(region.free_blocks(), static_cast<int>(free.size()));
    }
  }
}

}  // namespace
}  // namespace writescope::kvcache
