// Sequences that begin alike share blocks, and eviction takes what nobody reads.
#include <gtest/gtest.h>

#include "tests/support/cache_rig.h"

namespace writescope::kvcache {
namespace {

using testing::CacheRig;
using testing::RandomTokens;

std::vector<TokenId> Joined(const std::vector<TokenId>& a, const std::vector<TokenId>& b) {
  std::vector<TokenId> tokens = a;
  tokens.insert(tokens.end(), b.begin(), b.end());
  return tokens;
}

// A sequence with these tokens, as far as possible from the cache. `found` of them were.
int Sequence(CacheRig& rig, const std::vector<TokenId>& tokens, int64_t* found = nullptr) {
  const int64_t length = static_cast<int64_t>(tokens.size());
  const int slot = rig.Add(length / kBlockTokens + 1);
  EXPECT_GE(slot, 0);
  const int64_t matched = rig.Match(slot, tokens, length - 1);
  if (found != nullptr) *found = matched;
  EXPECT_TRUE(rig.Append(slot, std::span(tokens).subspan(static_cast<size_t>(matched))).ok());
  EXPECT_TRUE(rig.cache().AwaitCommits(slot).ok());
  return slot;
}

TEST(KvSharing, AWholePrefixIsFoundAndReadFromTheSameBlocks) {
  CacheRig rig({.blocks = {2, 4, 8, 4}});
  const std::vector<TokenId> prefix = RandomTokens(1, 256);
  const int a = Sequence(rig, Joined(prefix, RandomTokens(2, 50)));
  int64_t found = 0;
  const int b = Sequence(rig, Joined(prefix, RandomTokens(3, 90)), &found);
  EXPECT_EQ(found, 256);
  for (size_t unit = 0; unit < 4; ++unit) {
    EXPECT_EQ(rig.cache().SealedBlocks(a)[unit], rig.cache().SealedBlocks(b)[unit]);
    EXPECT_EQ(rig.blocks().holders(rig.cache().SealedBlocks(a)[unit]), 2);
  }
  EXPECT_EQ(rig.CheckContents(a), "");
  EXPECT_EQ(rig.CheckContents(b), "");
}

TEST(KvSharing, StopsAtTheFirstDifferenceAndAtTheLimit) {
  CacheRig rig({.blocks = {0, 0, 16, 0}});
  const std::vector<TokenId> tokens = RandomTokens(1, 256);
  Sequence(rig, tokens);
  for (const int64_t changed : {0, 63, 64, 130, 255}) {
    std::vector<TokenId> other = tokens;
    ++other[static_cast<size_t>(changed)];
    const int slot = rig.Add(4);
    EXPECT_EQ(rig.Match(slot, other, 256), changed / 64 * 64) << changed;
    rig.Remove(slot);
  }
  for (const int64_t limit : {0, 63, 64, 191, 192, 255}) {
    const int slot = rig.Add(4);
    EXPECT_EQ(rig.Match(slot, tokens, limit), limit / 64 * 64) << limit;
    rig.Remove(slot);
  }
  const int slot = rig.Add(4);
  EXPECT_EQ(rig.Match(slot, std::span(tokens).first(100), 1000), 64);
}

TEST(KvSharing, BlocksLiveAsLongAsTheirLastReader) {
  CacheRig rig({.blocks = {0, 0, 6, 0}});
  const std::vector<TokenId> prefix = RandomTokens(1, 128);
  const int a = Sequence(rig, Joined(prefix, RandomTokens(2, 64)));
  const int b = Sequence(rig, Joined(prefix, RandomTokens(3, 64)));
  EXPECT_EQ(rig.AvailableBlocks(), 2);
  rig.Remove(a);
  EXPECT_EQ(rig.AvailableBlocks(), 3);  // a's own block
  // All that is available is taken by another, and b's prefix is still b's.
  const int c = Sequence(rig, RandomTokens(4, 3 * 64));
  EXPECT_EQ(rig.AvailableBlocks(), 0);
  EXPECT_EQ(rig.CheckContents(b), "");
  rig.Remove(b);
  EXPECT_EQ(rig.AvailableBlocks(), 3);
  rig.Remove(c);
  EXPECT_EQ(rig.AvailableBlocks(), 6);
}

TEST(KvSharing, EvictionTakesTheOldestSequenceFromItsEnd) {
  CacheRig rig({.blocks = {0, 0, 8, 0}});
  const std::vector<TokenId> old_tokens = RandomTokens(1, 256);
  const std::vector<TokenId> new_tokens = RandomTokens(2, 256);
  rig.Remove(Sequence(rig, old_tokens));
  rig.Remove(Sequence(rig, new_tokens));
  const auto cached = [&](const std::vector<TokenId>& tokens) {
    const int slot = rig.Add(4);
    const int64_t found = rig.Match(slot, tokens, 256);
    rig.cache().RemoveSequence(slot);
    return found;
  };
  // One block more is needed each time. Looking at the old one would make it the younger, so only
  // the new one is looked at.
  const int other = rig.Add(8);
  ASSERT_TRUE(rig.Append(other, RandomTokens(3, 3 * 64)).ok());
  EXPECT_EQ(cached(new_tokens), 256);
  {
    const int slot = rig.Add(4);
    EXPECT_EQ(rig.Match(slot, old_tokens, 256), 64);  // Its beginning is kept longest.
    rig.Remove(slot);
  }
  rig.Remove(other);
}

TEST(KvSharing, ContentWrittenTwiceIsIndexedOnce) {
  CacheRig rig({.blocks = {0, 0, 12, 0}});
  const std::vector<TokenId> tokens = RandomTokens(1, 200);
  // Both run side by side: neither finds the other's blocks when it begins.
  const int a = rig.Add(4);
  const int b = rig.Add(4);
  for (const int slot : {a, b}) {
    EXPECT_EQ(rig.Match(slot, tokens, 199), 0);
  }
  for (int64_t done = 0; done < 200; done += 50) {
    for (const int slot : {a, b}) {
      ASSERT_TRUE(rig.Append(slot, std::span(tokens).subspan(static_cast<size_t>(done), 50)).ok());
    }
  }
  EXPECT_EQ(rig.AvailableBlocks(), 6);
  rig.Remove(a);
  rig.Remove(b);
  EXPECT_EQ(rig.blocks().Usage()[2].cached, 3);
  EXPECT_EQ(rig.blocks().Usage()[2].free, 9);
  int64_t found = 0;
  const int c = Sequence(rig, tokens, &found);
  EXPECT_EQ(found, 192);
  EXPECT_EQ(rig.CheckContents(c), "");
}

TEST(KvSharing, OffMeansOff) {
  CacheRig rig({.blocks = {0, 0, 8, 0}, .prefix_cache = false});
  const std::vector<TokenId> tokens = RandomTokens(1, 200);
  rig.Remove(Sequence(rig, tokens));
  EXPECT_EQ(rig.blocks().Usage()[2].free, 8);
  int64_t found = -1;
  Sequence(rig, tokens, &found);
  EXPECT_EQ(found, 0);
}

// Blocks that are not sealed yet are nobody else's to read.
TEST(KvSharing, UnfinishedBlocksAreNotFound) {
  CacheRig rig({.blocks = {0, 0, 8, 0}, .link_bytes_per_s = 1e6});
  const std::vector<TokenId> tokens = RandomTokens(1, 65);
  const int a = rig.Add(2);
  ASSERT_TRUE(rig.Append(a, tokens).ok());  // 32 ms on the link
  const int b = rig.Add(2);
  EXPECT_EQ(rig.Match(b, tokens, 64), 0);
  ASSERT_TRUE(rig.cache().AwaitCommits(a).ok());
  rig.Remove(b);
  const int c = rig.Add(2);
  EXPECT_EQ(rig.Match(c, tokens, 64), 64);
}

// Tokens of the sequence that was abandoned in between have left no trace in the index.
TEST(KvSharing, AbandonedTokensAreNotIndexed) {
  CacheRig rig({.blocks = {0, 0, 8, 0}});
  const std::vector<TokenId> wrong = RandomTokens(1, 64);
  const std::vector<TokenId> right = RandomTokens(2, 64);
  const int a = rig.Add(2);
  int workspace_used = 0;
  const auto plan = rig.Prepare(a, 64, &workspace_used);
  ASSERT_TRUE(plan.ok());
  for (int layer = 0; layer < 2; ++layer) rig.WriteLayer(*plan, wrong, layer);
  rig.cache().AbandonWrite(*plan);
  ASSERT_TRUE(rig.Append(a, right).ok());
  ASSERT_TRUE(rig.cache().AwaitCommits(a).ok());
  for (const auto& [tokens, want] : {std::pair(wrong, 0), std::pair(right, 64)}) {
    const int slot = rig.Add(2);
    EXPECT_EQ(rig.Match(slot, tokens, 64), want);
    rig.Remove(slot);
  }
}

}  // namespace
}  // namespace writescope::kvcache
