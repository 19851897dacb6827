#include "engine/kvcache/inplace_kv_cache.h"

#include <gtest/gtest.h>

#include "tests/support/cache_rig.h"
#include "tests/support/seed.h"

namespace writescope::kvcache {
namespace {

using testing::CacheRig;
using testing::RandomTokens;

// Everything that a caller can see of a sequence and of the room that is left.
struct Seen {
  int64_t length;
  std::vector<int> blocks;
  std::array<int64_t, kNumRegions> bytes;
  int64_t device_tokens;
  int64_t unpromised;
  int64_t available;
  bool operator==(const Seen&) const = default;
};
Seen Look(CacheRig& rig, int slot) {
  const auto blocks = rig.cache().SealedBlocks(slot);
  return {rig.cache().length(slot),          {blocks.begin(), blocks.end()},
          rig.cache().Placement(slot).bytes, rig.cache().DeviceTokens(slot),
          rig.cache().UnpromisedBlocks(),    rig.AvailableBlocks()};
}

TEST(InplaceKvCache, EveryBlockIsWrittenOnceWhateverTheChunks) {
  CacheRig rig({.blocks = {3, 5, 5, 5}, .prefix_cache = false});
  const int slot = rig.Add(16);
  for (const int chunk : {1, 63, 64, 65, 127, 1, 1, 200, 63}) {
    ASSERT_TRUE(rig.Append(slot, RandomTokens(static_cast<uint64_t>(chunk), chunk)).ok());
  }
  ASSERT_EQ(rig.CheckContents(slot), "");
  EXPECT_EQ(rig.blocks().moved_bytes(), 0);
  // What left the tail or the workspace did so once.
  const int64_t device_bytes = rig.cache().Placement(slot).bytes[0];
  const int64_t sealed_bytes = static_cast<int64_t>(rig.cache().SealedBlocks(slot).size()) *
                               rig.geometry().block_bytes() * rig.options().num_layers;
  EXPECT_LE(rig.cache().committed_bytes(), sealed_bytes);
  EXPECT_GE(rig.cache().committed_bytes(), sealed_bytes - device_bytes);
}

TEST(InplaceKvCache, PlantedRelocationShowsUp) {
  CacheRig rig({.blocks = {0, 0, 4, 0}});
  const int slot = rig.Add(2);
  ASSERT_TRUE(rig.Append(slot, RandomTokens(1, 70)).ok());
  ASSERT_TRUE(rig.cache().AwaitCommits(slot).ok());
  ASSERT_EQ(rig.blocks().moved_bytes(), 0);
  rig.cache().mutable_blocks().CountWrite(rig.cache().SealedBlocks(slot)[0], 1);
  EXPECT_EQ(rig.blocks().moved_bytes(), rig.geometry().block_bytes());
}

TEST(InplaceKvCache, FailureInTheMiddleOfAPlanChangesNothing) {
  CacheRig rig({.blocks = {1, 1, 1, 1}, .prefix_cache = false});
  const int slot = rig.Add(4);
  ASSERT_TRUE(rig.Append(slot, RandomTokens(1, 100)).ok());
  ASSERT_TRUE(rig.cache().AwaitCommits(slot).ok());
  const Seen before = Look(rig, slot);
  for (const int chunk : {28 + 64 * 3, 300, 28 + 64 * 2, 28 + 64 * 2 + 1}) {
    int workspace_used = 1;
    const auto plan = rig.Prepare(slot, chunk, &workspace_used);
    if (chunk <= 28 + 64 * 2 + 1) {
      // Exactly what is there, and an open unit besides: fits.
      ASSERT_TRUE(plan.ok()) << plan.status();
      rig.cache().AbandonWrite(*plan);
    } else {
      ASSERT_TRUE(absl::IsResourceExhausted(plan.status())) << plan.status();
      EXPECT_NE(plan.status().message().find("position"), std::string::npos);
      EXPECT_EQ(workspace_used, 1);
    }
    EXPECT_EQ(Look(rig, slot), before) << chunk;
    EXPECT_EQ(rig.CheckContents(slot), "") << chunk;
  }
  ASSERT_TRUE(rig.Append(slot, RandomTokens(2, 28 + 64)).ok());
  EXPECT_EQ(rig.CheckContents(slot), "");
}

class AbandonTest : public ::testing::TestWithParam<KvGeometry> {};

TEST_P(AbandonTest, TheSequenceIsAsItWas) {
  for (const int before : {0, 1, 2, 15, 16, 17, 48, 63, 64, 101, 128}) {
    for (const int chunk : {1, 28, 64, 150}) {
      for (const int layers : {0, 1, 3}) {
        CacheRig rig({.geometry = GetParam(),
                      .num_layers = 3,
                      .blocks = {2, 2, 4, 2},
                      .prefix_cache = false});
        const int slot = rig.Add(5);
        const std::vector<TokenId> tokens = RandomTokens(3, before + chunk);
        const auto first = std::span(tokens).first(static_cast<size_t>(before));
        const auto then = std::span(tokens).subspan(static_cast<size_t>(before));
        if (before > 0) {
          ASSERT_TRUE(rig.Append(slot, first).ok());
        }
        ASSERT_TRUE(rig.cache().AwaitCommits(slot).ok());
        const Seen seen = Look(rig, slot);
        for (int round = 0; round < 2; ++round) {
          int workspace_used = 0;
          const auto plan = rig.Prepare(slot, chunk, &workspace_used);
          ASSERT_TRUE(plan.ok());
          for (int layer = 0; layer < layers; ++layer) {
            rig.WriteLayer(*plan, RandomTokens(99, chunk), layer);  // Not what comes later
          }
          rig.cache().AbandonWrite(*plan);
          ASSERT_EQ(Look(rig, slot), seen) << before << " + " << chunk << ", " << layers;
          // Slots past the end are zero again too.
          ASSERT_EQ(rig.CheckContents(slot), "") << before << " + " << chunk << ", " << layers;
        }
        ASSERT_TRUE(rig.Append(slot, then).ok());
        ASSERT_EQ(rig.CheckContents(slot), "") << before << " + " << chunk << ", " << layers;
        EXPECT_EQ(rig.blocks().moved_bytes(), 0);
        EXPECT_EQ(rig.CheckLedger(), "");
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Formats, AbandonTest,
    ::testing::Values(
        KvGeometry{.num_kv_heads = 2, .k_dim = 32, .v_dim = 64, .dtype = KvDtype::kF32},
        KvGeometry{.num_kv_heads = 2, .k_dim = 32, .v_dim = 64, .dtype = KvDtype::kBf16},
        KvGeometry{.num_kv_heads = 1,
                   .k_dim = 96,
                   .v_dim = 64,
                   .value_in_key = true,
                   .dtype = KvDtype::kBf16}));

TEST(InplaceKvCache, AbandonedStepsUseUpNoQuota) {
  CacheRig rig({.blocks = {8, 0, 8, 0}, .prefix_cache = false});
  const int slot = rig.Add(3);
  for (int round = 0; round < 5; ++round) {
    int workspace_used = 0;
    const auto plan = rig.Prepare(slot, 128, &workspace_used);
    ASSERT_TRUE(plan.ok());
    rig.cache().AbandonWrite(*plan);
  }
  ASSERT_TRUE(rig.Append(slot, RandomTokens(1, 192)).ok());
  EXPECT_EQ(rig.cache().DeviceTokens(slot), 192);
}

// With a link so slow that commits are under way for a while.
class SlowLinkTest : public ::testing::Test {
 protected:
  SlowLinkTest() : rig_({.blocks = {0, 0, 8, 0}, .link_bytes_per_s = 2e6}), slot_(rig_.Add(4)) {}
  int64_t SealedUnits() const {
    int64_t sealed = 0;
    for (const int id : rig_.cache().SealedBlocks(slot_)) sealed += rig_.blocks().sealed(id);
    return sealed;
  }
  mutable CacheRig rig_;
  int slot_;
};

TEST_F(SlowLinkTest, ReadersUseTheTailUntilTheCommitLands) {
  ASSERT_TRUE(rig_.Append(slot_, RandomTokens(1, 40)).ok());
  ASSERT_TRUE(rig_.Append(slot_, RandomTokens(2, 24 + 10)).ok());  // Unit 0 leaves the tail
  int workspace_used = 0;
  const auto plan = rig_.Prepare(slot_, 1, &workspace_used);
  ASSERT_TRUE(plan.ok());
  const SequenceView view = rig_.cache().View(slot_, *plan);
  EXPECT_EQ(view.block_ids.size(), 0u);  // The copy takes 16 ms
  ASSERT_EQ(view.open.size(), 2u);
  EXPECT_EQ(view.open[0].num_tokens, 64);
  EXPECT_EQ(view.open[1].num_tokens, 11);
  rig_.cache().AbandonWrite(*plan);
  ASSERT_TRUE(rig_.cache().AwaitCommits(slot_).ok());
  EXPECT_EQ(SealedUnits(), 1);
  EXPECT_EQ(rig_.CheckContents(slot_), "");
}

TEST_F(SlowLinkTest, ANewTailUnitWaitsForItsHalf) {
  // Units 0, 1 and 2 leave the tail one after another, faster than the link takes them.
  ASSERT_TRUE(rig_.Append(slot_, RandomTokens(1, 63)).ok());
  for (int step = 0; step < 3; ++step) {
    ASSERT_TRUE(rig_.Append(slot_, RandomTokens(2, 64)).ok());
  }
  EXPECT_EQ(rig_.CheckContents(slot_), "");
  EXPECT_EQ(rig_.blocks().moved_bytes(), 0);
}

TEST_F(SlowLinkTest, BlocksAreNotGivenAwayBeforeTheirCommitLands) {
  ASSERT_TRUE(rig_.Append(slot_, RandomTokens(1, 40)).ok());
  ASSERT_TRUE(rig_.Append(slot_, RandomTokens(2, 24)).ok());
  EXPECT_EQ(SealedUnits(), 0);
  rig_.Remove(slot_);
  EXPECT_TRUE(rig_.device().download().Record().Done());
  EXPECT_EQ(rig_.AvailableBlocks(), 8);
  EXPECT_EQ(rig_.CheckLedger(), "");
}

TEST_F(SlowLinkTest, AnAbandonedStepsCopiesHaveEnded) {
  int workspace_used = 0;
  const auto plan = rig_.Prepare(slot_, 128, &workspace_used);
  ASSERT_TRUE(plan.ok());
  for (int layer = 0; layer < 2; ++layer) rig_.WriteLayer(*plan, RandomTokens(1, 128), layer);
  rig_.cache().AbandonWrite(*plan);
  EXPECT_TRUE(rig_.device().download().Record().Done());
  EXPECT_EQ(rig_.AvailableBlocks(), 8);
}

TEST_F(SlowLinkTest, PromptUnitsAreWaitedForBeforeTheNextStepReadsThem) {
  ASSERT_TRUE(rig_.Append(slot_, RandomTokens(1, 3 * 64 + 5)).ok());
  int workspace_used = 0;
  const auto plan = rig_.Prepare(slot_, 1, &workspace_used);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(rig_.cache().View(slot_, *plan).block_ids.size(), 3u);
  rig_.cache().AbandonWrite(*plan);
  EXPECT_EQ(rig_.CheckContents(slot_), "");
}

TEST(InplaceKvCache, SlotsAndPromises) {
  CacheRig rig({.max_sequences = 2, .blocks = {4, 0, 6, 0}});
  EXPECT_EQ(rig.cache().UnpromisedBlocks(), 10);
  const int a = rig.Add(3);
  const int b = rig.Add(5);
  EXPECT_NE(a, b);
  EXPECT_EQ(rig.Add(1), -1);
  EXPECT_EQ(rig.cache().UnpromisedBlocks(), 2);
  ASSERT_TRUE(rig.Append(a, RandomTokens(1, 130)).ok());
  EXPECT_EQ(rig.cache().UnpromisedBlocks(), 2);  // Kept promises and open ones add up.
  rig.Remove(a);
  EXPECT_EQ(rig.cache().UnpromisedBlocks(), 5);
  rig.Remove(b);
  EXPECT_EQ(rig.cache().UnpromisedBlocks(), 10);
}

TEST(InplaceKvCache, AShortSequenceStaysOnTheDeviceAndALongOneIsDivided) {
  CacheRig rig({.blocks = {8, 4, 8, 4}, .prefix_cache = false});
  const int chat = rig.Add(2);
  ASSERT_TRUE(rig.Append(chat, RandomTokens(1, 128)).ok());
  EXPECT_EQ(rig.cache().DeviceTokens(chat), 128);
  const int book = rig.Add(18);
  ASSERT_TRUE(rig.Append(book, RandomTokens(2, 400)).ok());
  ASSERT_TRUE(rig.Append(book, RandomTokens(3, 400)).ok());
  const SequencePlacement placement = rig.cache().Placement(book);
  const int64_t unit_bytes = rig.geometry().block_bytes() * rig.options().num_layers;
  // Six blocks are free on the device; the book expects more than that and takes its part of 18.
  EXPECT_EQ(rig.cache().DeviceTokens(book), 6 * 64);
  EXPECT_EQ(placement.bytes[1] + placement.bytes[2] + placement.bytes[3], 6 * unit_bytes);
  EXPECT_GE(placement.bytes[2], placement.bytes[1]);
  EXPECT_GE(placement.bytes[2], placement.bytes[3]);
  EXPECT_EQ(rig.CheckContents(book), "");
}

TEST(InplaceKvCache, FixedDeviceBytesIsWhatItTakes) {
  CacheRig rig({.max_sequences = 3, .chunk_tokens = 256, .blocks = {5, 0, 2, 0}});
  const InplaceKvCache::Options& options = rig.cache().options();
  const int64_t region_bytes = 5 * rig.geometry().block_bytes() * rig.options().num_layers;
  EXPECT_EQ(rig.device().device_used_bytes(),
            InplaceKvCache::FixedDeviceBytes(options) + region_bytes);
}

}  // namespace
}  // namespace writescope::kvcache
