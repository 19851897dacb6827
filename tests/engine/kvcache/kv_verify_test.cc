// The checksum that is taken when a block is sealed finds a change in every region, end to end.
#include <gtest/gtest.h>

#include "tests/support/cache_rig.h"

namespace writescope::kvcache {
namespace {

using testing::CacheRig;
using testing::RandomTokens;

TEST(KvVerify, FindsOneFlippedBitAnywhereInASequence) {
  CacheRig rig({.blocks = {2, 2, 2, 2}, .prefix_cache = false});
  const int slot = rig.Add(8);
  ASSERT_TRUE(rig.Append(slot, RandomTokens(1, 500)).ok());
  ASSERT_TRUE(rig.cache().AwaitCommits(slot).ok());
  std::array<int, kNumRegions> seen{};
  for (const int id : rig.cache().SealedBlocks(slot)) {
    const BlockPlace place = rig.blocks().home(id);
    ++seen[static_cast<size_t>(place.region)];
    EXPECT_TRUE(rig.blocks().Verify(id).ok());
    for (int layer = 0; layer < rig.options().num_layers; ++layer) {
      std::byte* block = rig.blocks().region(place.region).Address(layer, place.index);
      for (int64_t at = 0; at < rig.geometry().block_bytes(); at += 4093) {
        block[at] ^= std::byte{0x40};
        EXPECT_TRUE(absl::IsDataLoss(rig.blocks().Verify(id)));
        block[at] ^= std::byte{0x40};
      }
    }
    EXPECT_TRUE(rig.blocks().Verify(id).ok());
  }
  for (const int blocks : seen) EXPECT_GT(blocks, 0);
}

TEST(KvVerify, OffCostsNothingAndSaysNothing) {
  CacheRig rig({.blocks = {0, 0, 2, 0}, .verify = false});
  const int slot = rig.Add(2);
  ASSERT_TRUE(rig.Append(slot, RandomTokens(1, 64)).ok());
  ASSERT_TRUE(rig.cache().AwaitCommits(slot).ok());
  const int id = rig.cache().SealedBlocks(slot)[0];
  const BlockPlace place = rig.blocks().home(id);
  rig.blocks().region(place.region).Address(0, place.index)[5] ^= std::byte{1};
  EXPECT_TRUE(rig.blocks().Verify(id).ok());
}

}  // namespace
}  // namespace writescope::kvcache
