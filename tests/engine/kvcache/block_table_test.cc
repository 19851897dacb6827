#include "engine/kvcache/block_table.h"

#include <gtest/gtest.h>

#include <cstring>

#include "engine/base/units.h"
#include "engine/device/cpu/cpu_device.h"

namespace writescope::kvcache {
namespace {

constexpr KvGeometry kGeometry = {
    .num_kv_heads = 1, .k_dim = 32, .v_dim = 32, .dtype = KvDtype::kBf16};

class BlockTableTest : public ::testing::Test {
 protected:
  BlockTable Make(std::array<int64_t, kNumRegions> blocks, int num_layers = 2) {
    auto table = BlockTable::Create(
        {.geometry = kGeometry, .num_layers = num_layers, .blocks = blocks, .verify = true},
        *device_);
    EXPECT_TRUE(table.ok()) << table.status();
    return *std::move(table);
  }
  // A sealed block; with `content` findable under it.
  static int Sealed(BlockTable& table, const PlacementRequest& request = {}) {
    const int id = table.Allocate(request, -1);
    if (id < 0) return id;
    for (int layer = 0; layer < table.num_layers(); ++layer) table.CountWrite(id, layer);
    table.Seal(id);
    return id;
  }
  static std::vector<TokenId> Unit(TokenId value) {
    return std::vector<TokenId>(kBlockTokens, value);
  }
  static RegionUsage UsageOf(const BlockTable& table, RegionKind kind) {
    return table.Usage()[static_cast<size_t>(kind)];
  }
  std::unique_ptr<device::CpuDevice> device_ =
      *device::CpuDevice::Create({.budget_bytes = 4 * kMiB});
};

TEST_F(BlockTableTest, HoldersKeepABlockAndTheLastFreesIt) {
  BlockTable table = Make({0, 0, 2, 0});
  const int id = Sealed(table);
  table.Hold(id);
  table.Hold(id);
  EXPECT_EQ(table.holders(id), 3);
  for (int i = 0; i < 2; ++i) {
    table.Release(id);
    EXPECT_EQ(UsageOf(table, RegionKind::kSwing).used, 1);
  }
  table.Release(id);
  EXPECT_EQ(UsageOf(table, RegionKind::kSwing).free, 2);
  EXPECT_DEATH(table.Release(id), "block");
}

TEST_F(BlockTableTest, IndexedBlocksAreCachedAndEvictedOldestFirst) {
  BlockTable table = Make({0, 0, 3, 0});
  int ids[3];
  for (int i = 0; i < 3; ++i) {
    ids[i] = Sealed(table);
    table.Index(ids[i], PrefixIndex::kRoot, Unit(i));
  }
  EXPECT_EQ(Sealed(table), -1);  // All are held.
  for (const int i : {1, 0, 2}) table.Release(ids[i]);
  EXPECT_EQ(UsageOf(table, RegionKind::kSwing).cached, 3);
  // Taken up again, a block is no longer first in line.
  const auto found = table.FindPrefix(PrefixIndex::kRoot, Unit(1));
  EXPECT_EQ(found.block_id, ids[1]);
  table.Hold(found.block_id);
  EXPECT_EQ(UsageOf(table, RegionKind::kSwing).cached, 2);
  ASSERT_GE(Sealed(table), 0);  // Evicts 0.
  EXPECT_EQ(table.FindPrefix(PrefixIndex::kRoot, Unit(0)).entry, PrefixIndex::kNone);
  EXPECT_NE(table.FindPrefix(PrefixIndex::kRoot, Unit(2)).entry, PrefixIndex::kNone);
  ASSERT_GE(Sealed(table), 0);  // Evicts 2.
  EXPECT_EQ(Sealed(table), -1);
  EXPECT_NE(table.FindPrefix(PrefixIndex::kRoot, Unit(1)).entry, PrefixIndex::kNone);
}

TEST_F(BlockTableTest, EqualContentIsIndexedOnce) {
  BlockTable table = Make({0, 0, 4, 0});
  const int first = Sealed(table);
  const int second = Sealed(table);
  const auto entry = table.Index(first, PrefixIndex::kRoot, Unit(1));
  EXPECT_EQ(table.Index(second, PrefixIndex::kRoot, Unit(1)), entry);
  table.Release(second);  // Not in the index: freed.
  EXPECT_EQ(UsageOf(table, RegionKind::kSwing).cached, 0);
  EXPECT_EQ(UsageOf(table, RegionKind::kSwing).free, 3);
  table.Release(first);
  EXPECT_EQ(UsageOf(table, RegionKind::kSwing).cached, 1);
}

TEST_F(BlockTableTest, SecondWriteOfALayerCountsAsMoved) {
  BlockTable table = Make({0, 0, 2, 0}, 3);
  const int id = table.Allocate({}, -1);
  for (int layer = 0; layer < 3; ++layer) table.CountWrite(id, layer);
  EXPECT_EQ(table.moved_bytes(), 0);
  table.CountWrite(id, 1);  // The planted relocation
  EXPECT_EQ(table.moved_bytes(), kGeometry.block_bytes());
  table.Seal(id);
  table.CountWrite(id, 2);
  EXPECT_EQ(table.moved_bytes(), 2 * kGeometry.block_bytes());
  // A new owner of the same memory begins anew.
  table.Release(id);
  const int next = table.Allocate({}, -1);
  for (int layer = 0; layer < 3; ++layer) table.CountWrite(next, layer);
  EXPECT_EQ(table.moved_bytes(), 2 * kGeometry.block_bytes());
}

TEST_F(BlockTableTest, SealNeedsEveryLayer) {
  BlockTable table = Make({0, 0, 2, 0}, 2);
  const int id = table.Allocate({}, -1);
  table.CountWrite(id, 0);
  EXPECT_DEATH(table.Seal(id), "block 0");
}

TEST_F(BlockTableTest, BlocksOfASequenceFollowOneAnotherInTheirRegion) {
  BlockTable table = Make({4, 0, 8, 0});
  int previous = -1;
  for (int i = 0; i < 8; ++i) {
    previous = table.Allocate({}, previous);
    EXPECT_EQ(table.home(previous).region, RegionKind::kSwing);
    EXPECT_EQ(table.home(previous).index, i);
  }
}

TEST_F(BlockTableTest, RetainedCopiesAreReadOnceLandedAndGoWhenRoomIsNeeded) {
  BlockTable table = Make({3, 0, 4, 0});
  const int a = Sealed(table);
  const int b = Sealed(table);
  ASSERT_GE(table.BeginRetain(a, 0), 0);
  EXPECT_EQ(table.read_place(a).region, RegionKind::kSwing);  // Not landed
  table.FinishRetain(a, /*landed=*/true);
  EXPECT_EQ(table.read_place(a).region, RegionKind::kDevice);
  EXPECT_EQ(table.home(a).region, RegionKind::kSwing);
  ASSERT_GE(table.BeginRetain(b, 0), 0);
  table.FinishRetain(b, /*landed=*/false);
  EXPECT_EQ(table.read_place(b).region, RegionKind::kSwing);
  EXPECT_EQ(UsageOf(table, RegionKind::kDevice).retained, 1);
  EXPECT_EQ(table.BeginRetain(b, 2), -1);  // Two would not be left free.

  const PlacementRequest on_device = {.device_quota = {.blocks = 100}};
  EXPECT_EQ(table.Fill().available[0], 3);
  table.LockRetained(true);
  EXPECT_EQ(table.Fill().available[0], 2);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(table.home(table.Allocate(on_device, -1)).region, RegionKind::kDevice);
  }
  // Locked, the copy stays and the block goes elsewhere.
  EXPECT_EQ(table.home(table.Allocate(on_device, -1)).region, RegionKind::kSwing);
  EXPECT_EQ(table.read_place(a).region, RegionKind::kDevice);
  table.LockRetained(false);
  EXPECT_EQ(table.home(table.Allocate(on_device, -1)).region, RegionKind::kDevice);
  EXPECT_EQ(table.read_place(a).region, RegionKind::kSwing);  // Dropped; the home is as it was.
  EXPECT_EQ(UsageOf(table, RegionKind::kDevice).retained, 0);
  EXPECT_EQ(table.moved_bytes(), 0);
}

TEST_F(BlockTableTest, LockedCopiesStayAlsoWhereACachedBlockCanGo) {
  BlockTable table = Make({2, 0, 2, 0});
  const PlacementRequest on_device = {.device_quota = {.blocks = 100}};
  const int cached = Sealed(table, on_device);
  table.Index(cached, PrefixIndex::kRoot, Unit(1));
  const int spilled = Sealed(table);
  ASSERT_GE(table.BeginRetain(spilled, 0), 0);
  table.FinishRetain(spilled, true);
  table.Release(cached);
  table.LockRetained(true);
  EXPECT_EQ(table.home(table.Allocate(on_device, -1)).region, RegionKind::kDevice);
  EXPECT_EQ(table.read_place(spilled).region, RegionKind::kDevice);
  EXPECT_EQ(table.FindPrefix(PrefixIndex::kRoot, Unit(1)).entry, PrefixIndex::kNone);
}

TEST_F(BlockTableTest, RetainedCopyGoesWithItsBlock) {
  BlockTable table = Make({2, 0, 2, 0});
  const int id = Sealed(table);
  ASSERT_GE(table.BeginRetain(id, 0), 0);
  table.FinishRetain(id, true);
  table.Release(id);
  EXPECT_EQ(UsageOf(table, RegionKind::kDevice).free, 2);
  EXPECT_EQ(UsageOf(table, RegionKind::kSwing).free, 2);
}

TEST_F(BlockTableTest, RetainedCopiesOfARunFormARun) {
  BlockTable table = Make({8, 0, 8, 0});
  int previous = -1;
  std::vector<int> places;
  for (int i = 0; i < 6; ++i) {
    previous = table.Allocate({}, previous);
    for (int layer = 0; layer < 2; ++layer) table.CountWrite(previous, layer);
    table.Seal(previous);
    places.push_back(table.BeginRetain(previous, 0));
  }
  for (size_t i = 1; i < places.size(); ++i) EXPECT_EQ(places[i], places[i - 1] + 1);
}

TEST_F(BlockTableTest, VerifyFindsAFlippedBitInEveryRegionAndInACopy) {
  for (const RegionKind kind : kAllRegions) {
    std::array<int64_t, kNumRegions> blocks{};
    blocks[static_cast<size_t>(kind)] = 2;
    if (kind != RegionKind::kDevice) blocks[0] = 1;
    BlockTable table = Make(blocks);
    const PlacementRequest request = {
        .device_quota = {.blocks = kind == RegionKind::kDevice ? 5 : 0}};
    const int id = Sealed(table, request);
    const BlockPlace home = table.home(id);
    ASSERT_EQ(home.region, kind);
    EXPECT_TRUE(table.Verify(id).ok());
    for (int layer = 0; layer < 2; ++layer) {
      std::byte* at = table.region(kind).Address(layer, home.index);
      for (const int64_t offset : {int64_t{0}, kGeometry.block_bytes() - 1}) {
        at[offset] ^= std::byte{0x10};
        const absl::Status wrong = table.Verify(id);
        EXPECT_TRUE(absl::IsDataLoss(wrong)) << RegionName(kind) << ": " << wrong;
        EXPECT_NE(wrong.message().find(std::string(RegionName(kind))), std::string::npos);
        at[offset] ^= std::byte{0x10};
        EXPECT_TRUE(table.Verify(id).ok());
      }
    }
    if (kind == RegionKind::kDevice) continue;
    const int copy = table.BeginRetain(id, 0);
    ASSERT_GE(copy, 0);
    for (int layer = 0; layer < 2; ++layer) {
      std::memcpy(table.region(RegionKind::kDevice).Address(layer, copy),
                  table.region(kind).Address(layer, home.index),
                  static_cast<size_t>(kGeometry.block_bytes()));
    }
    table.FinishRetain(id, true);
    EXPECT_TRUE(table.Verify(id).ok());
    table.region(RegionKind::kDevice).Address(1, copy)[77] ^= std::byte{1};
    EXPECT_TRUE(absl::IsDataLoss(table.Verify(id))) << RegionName(kind);
  }
}

}  // namespace
}  // namespace writescope::kvcache
