#include "engine/kvcache/prefix_index.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

#include "tests/support/seed.h"

namespace writescope::kvcache {
namespace {

using testing_support::TestSeed;

std::vector<TokenId> Unit(TokenId first, TokenId changed = -1) {
  std::vector<TokenId> tokens;
  for (TokenId i = 0; i < kBlockTokens; ++i) tokens.push_back(first + i);
  if (changed >= 0) tokens.back() = changed;
  return tokens;
}

TEST(PrefixIndex, FindsByContentAndParent) {
  PrefixIndex index;
  EXPECT_EQ(index.Find(PrefixIndex::kRoot, Unit(0)).entry, PrefixIndex::kNone);
  bool added = false;
  const auto first = index.Add(PrefixIndex::kRoot, Unit(0), 5, &added);
  EXPECT_TRUE(added);
  const auto second = index.Add(first, Unit(64), 6, &added);
  EXPECT_TRUE(added);
  EXPECT_EQ(index.Find(PrefixIndex::kRoot, Unit(0)).block_id, 5);
  EXPECT_EQ(index.Find(first, Unit(64)).block_id, 6);
  EXPECT_EQ(index.Find(first, Unit(64)).entry, second);
  // The same tokens elsewhere are other keys: positions are baked in.
  EXPECT_EQ(index.Find(PrefixIndex::kRoot, Unit(64)).entry, PrefixIndex::kNone);
  EXPECT_EQ(index.Find(second, Unit(64)).entry, PrefixIndex::kNone);
  EXPECT_EQ(index.Find(PrefixIndex::kRoot, Unit(0, 999)).entry, PrefixIndex::kNone);
}

TEST(PrefixIndex, OlderContentStands) {
  PrefixIndex index;
  bool added = false;
  const auto older = index.Add(PrefixIndex::kRoot, Unit(0), 5, &added);
  EXPECT_EQ(index.Add(PrefixIndex::kRoot, Unit(0), 9, &added), older);
  EXPECT_FALSE(added);
  EXPECT_EQ(index.Find(PrefixIndex::kRoot, Unit(0)).block_id, 5);
  EXPECT_EQ(index.size(), 1u);
}

TEST(PrefixIndex, ChildrenOfTheRemovedAreNotFoundAgain) {
  PrefixIndex index;
  bool added = false;
  const auto first = index.Add(PrefixIndex::kRoot, Unit(0), 5, &added);
  const auto second = index.Add(first, Unit(64), 6, &added);
  index.Remove(first);
  EXPECT_EQ(index.Find(PrefixIndex::kRoot, Unit(0)).entry, PrefixIndex::kNone);
  const auto again = index.Add(PrefixIndex::kRoot, Unit(0), 7, &added);
  EXPECT_TRUE(added);
  EXPECT_NE(again, first);  // Ids are never reused, so the old child has no way back in.
  EXPECT_EQ(index.Find(again, Unit(64)).entry, PrefixIndex::kNone);
  index.Remove(second);
  EXPECT_EQ(index.size(), 1u);
  EXPECT_DEATH(index.Remove(second), "prefix entry");
}

TEST(PrefixIndex, RandomAgainstAMapOfWholePrefixes) {
  std::mt19937_64 random(TestSeed());
  PrefixIndex index;
  std::map<std::vector<TokenId>, std::pair<PrefixIndex::EntryId, int>> model;
  int next_block = 0;
  for (int step = 0; step < 3000; ++step) {
    // A path of up to three units of few kinds, so that paths meet often.
    std::vector<TokenId> path;
    PrefixIndex::EntryId parent = PrefixIndex::kRoot;
    for (int depth = 1 + static_cast<int>(random() % 3); depth > 0; --depth) {
      const std::vector<TokenId> unit =
          Unit(static_cast<TokenId>(random() % 3) * 1000, static_cast<TokenId>(random() % 2));
      path.insert(path.end(), unit.begin(), unit.end());
      const auto known = model.find(path);
      const auto found = index.Find(parent, unit);
      if (known != model.end()) {
        ASSERT_EQ(found.entry, known->second.first);
        ASSERT_EQ(found.block_id, known->second.second);
      } else {
        ASSERT_EQ(found.entry, PrefixIndex::kNone);
        bool added = false;
        const auto entry = index.Add(parent, unit, next_block, &added);
        ASSERT_TRUE(added);
        model[path] = {entry, next_block++};
      }
      parent = model[path].first;
    }
    // A removal takes a leaf, as eviction does.
    if (random() % 3 == 0) {
      const auto gone = model.find(path);
      const auto next = std::next(gone);
      const bool leaf = next == model.end() ||
                        !std::equal(path.begin(), path.end(), next->first.begin(),
                                    next->first.begin() + static_cast<int64_t>(std::min(
                                                              path.size(), next->first.size())));
      if (leaf) {
        index.Remove(gone->second.first);
        model.erase(gone);
      }
    }
    ASSERT_EQ(index.size(), model.size());
  }
}

}  // namespace
}  // namespace writescope::kvcache
