// Open tails: where a token's key and value go and where readers find them, for every length and
// way to get there.
#include <gtest/gtest.h>

#include <random>

#include "tests/support/cache_rig.h"
#include "tests/support/seed.h"

namespace writescope::kvcache {
namespace {

using testing::CacheRig;
using testing::CacheRigOptions;
using testing::Mix;
using testing::RandomTokens;
using testing_support::TestSeed;

CacheRigOptions FourRegions(KvDtype dtype) {
  return {.geometry = {.num_kv_heads = 2, .k_dim = 32, .v_dim = 32, .dtype = dtype},
          .blocks = {2, 6, 6, 6},
          .prefix_cache = false};
}

class TailsTest : public ::testing::TestWithParam<KvDtype> {};

TEST_P(TailsTest, EveryLengthInRandomChunks) {
  CacheRig rig(FourRegions(GetParam()));
  std::mt19937_64 random(TestSeed());
  for (int length = 1; length <= 200; ++length) {
    const int slot = rig.Add(4);
    const std::vector<TokenId> tokens = RandomTokens(random(), length);
    std::string chunks;
    for (int done = 0; done < length;) {
      const int longest = std::min<int>(length - done, random() % 3 == 0 ? 200 : 5);
      const int chunk = 1 + static_cast<int>(random() % static_cast<uint64_t>(longest));
      chunks += std::to_string(chunk) + " ";
      ASSERT_TRUE(rig.Append(slot, std::span(tokens).subspan(static_cast<size_t>(done),
                                                             static_cast<size_t>(chunk)))
                      .ok());
      done += chunk;
    }
    ASSERT_EQ(rig.cache().length(slot), length);
    ASSERT_EQ(rig.CheckContents(slot), "") << "chunks " << chunks;
    rig.Remove(slot);
  }
  EXPECT_EQ(rig.blocks().moved_bytes(), 0);
  EXPECT_EQ(rig.AvailableBlocks(), 20);
}

// One sequence, read back after every single token: half-full tails, full ones under way, and
// homes.
TEST_P(TailsTest, ReadableAfterEveryToken) {
  CacheRig rig(FourRegions(GetParam()));
  const int slot = rig.Add(6);
  const std::vector<TokenId> tokens = RandomTokens(TestSeed(), 330);
  for (int i = 0; i < 330; ++i) {
    ASSERT_TRUE(rig.Append(slot, {&tokens[static_cast<size_t>(i)], 1}).ok());
    if (i % 64 > 2 && i % 64 < 60 && i % 13 != 0) continue;  // Near the borders always
    ASSERT_EQ(rig.CheckContents(slot), "") << "after token " << i;
  }
  EXPECT_EQ(rig.blocks().moved_bytes(), 0);
}

// Readers inside the step see the step's own tokens, from wherever they were written to.
TEST_P(TailsTest, AStepSeesItsOwnTokens) {
  for (const int before : {0, 1, 10, 63, 64, 65, 127}) {
    for (const int chunk : {1, 2, 53, 54, 55, 64, 65, 128, 200}) {
      CacheRig rig(FourRegions(GetParam()));
      const int slot = rig.Add(6);
      const std::vector<TokenId> tokens = RandomTokens(TestSeed(), before + chunk);
      const auto first = std::span(tokens).first(static_cast<size_t>(before));
      const auto then = std::span(tokens).subspan(static_cast<size_t>(before));
      if (before > 0) {
        ASSERT_TRUE(rig.Append(slot, first).ok());
      }
      int workspace_used = 0;
      const auto plan = rig.Prepare(slot, chunk, &workspace_used);
      ASSERT_TRUE(plan.ok()) << plan.status();
      // The workspace holds two layers; so the last two are there to be looked at.
      for (int layer = 0; layer < rig.options().num_layers; ++layer) {
        rig.WriteLayer(*plan, then, layer);
      }
      EXPECT_EQ(rig.CheckView(*plan, tokens), "") << before << " + " << chunk;
      rig.Finish(*plan, then);
      EXPECT_EQ(rig.CheckContents(slot), "") << before << " + " << chunk;
      EXPECT_EQ(rig.blocks().moved_bytes(), 0);
    }
  }
}

TEST_P(TailsTest, ViewCoversSealedPendingAndOwnTokensInOrder) {
  CacheRig rig(FourRegions(GetParam()));
  const int slot = rig.Add(6);
  ASSERT_TRUE(rig.Append(slot, RandomTokens(1, 130)).ok());
  int workspace_used = 0;
  const std::vector<TokenId> more = RandomTokens(2, 200);
  const auto plan = rig.Prepare(slot, 200, &workspace_used);
  ASSERT_TRUE(plan.ok());
  const SequenceView view = rig.cache().View(slot, *plan);
  EXPECT_EQ(view.block_ids.size(), 2u);
  ASSERT_EQ(view.open.size(), 4u);
  int64_t position = 128;
  for (const OpenSpan& span : view.open) {
    EXPECT_EQ(span.first_position, position);
    position += span.num_tokens;
  }
  EXPECT_EQ(position, 330);
  rig.cache().AbandonWrite(*plan);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, TailsTest, ::testing::Values(KvDtype::kF32, KvDtype::kBf16),
                         [](const auto& info) {
                           return info.param == KvDtype::kF32 ? std::string("F32")
                                                              : std::string("Bf16");
                         });

TEST(Tails, ChunkThatEndsInTheHalfItBegan) {
  CacheRig rig({.blocks = {0, 0, 8, 0}, .prefix_cache = false});
  const int slot = rig.Add(6);
  // Half A holds unit 0; the chunk fills it, passes over two whole units and opens unit 3: that has
  // to be half B, since A is on its way home.
  ASSERT_TRUE(rig.Append(slot, RandomTokens(1, 40)).ok());
  int workspace_used = 0;
  auto plan = rig.Prepare(slot, 24 + 128 + 7, &workspace_used);
  ASSERT_TRUE(plan.ok());
  ASSERT_EQ(plan->units.size(), 4u);
  EXPECT_EQ(workspace_used, 2);
  EXPECT_GE(plan->units[0].tail_half, 0);
  EXPECT_LT(plan->units[1].tail_half, 0);
  EXPECT_GE(plan->units[3].tail_half, 0);
  EXPECT_NE(plan->units[0].tail_half, plan->units[3].tail_half);
  rig.cache().AbandonWrite(*plan);

  // A chunk inside one unit stays in its half, and one that ends at the unit's end too.
  for (const int chunk : {5, 19}) {
    workspace_used = 0;
    plan = rig.Prepare(slot, chunk, &workspace_used);
    ASSERT_TRUE(plan.ok());
    ASSERT_EQ(plan->units.size(), 1u);
    rig.WriteLayer(*plan, RandomTokens(2, chunk), 0);
    rig.WriteLayer(*plan, RandomTokens(2, chunk), 1);
    rig.Finish(*plan, RandomTokens(2, chunk));
    EXPECT_EQ(rig.CheckContents(slot), "");
  }
  ASSERT_EQ(rig.cache().length(slot), 64);
  // The unit after it begins while the last one may be under way.
  ASSERT_TRUE(rig.Append(slot, RandomTokens(3, 64 + 64 + 3)).ok());
  EXPECT_EQ(rig.CheckContents(slot), "");
}

// A slot's tail is zeroed for its next owner, whatever lay there.
TEST(Tails, NextOwnerFindsZeros) {
  CacheRig rig({.max_sequences = 1, .blocks = {0, 0, 8, 0}, .prefix_cache = false});
  for (int round = 0; round < 6; ++round) {
    const int slot = rig.Add(2);
    ASSERT_TRUE(rig.Append(slot, RandomTokens(static_cast<uint64_t>(round), 63 + 30 * round)).ok());
    ASSERT_EQ(rig.CheckContents(slot), "") << "round " << round;
    rig.Remove(slot);
    const int next = rig.Add(2);
    ASSERT_TRUE(rig.Append(next, RandomTokens(99, 1 + round)).ok());
    ASSERT_EQ(rig.CheckContents(next), "") << "round " << round;
    rig.Remove(next);
  }
}

}  // namespace
}  // namespace writescope::kvcache
