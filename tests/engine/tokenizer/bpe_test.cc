// The merge step against its plain twin, which looks for the best pair anew each time.
#include "engine/tokenizer/bpe.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "tests/support/seed.h"

namespace writescope::tokenizer {
namespace {

struct Rule {
  int32_t rank;
  int32_t merged;
};
using Rules = std::map<std::pair<int32_t, int32_t>, Rule>;

std::vector<int32_t> MergePlainly(const Rules& rules, std::vector<int32_t> symbols) {
  for (;;) {
    int best = -1;
    Rule best_rule = {INT32_MAX, 0};
    for (int i = 0; i + 1 < static_cast<int>(symbols.size()); ++i) {
      const auto at = symbols.begin() + i;
      const auto rule = rules.find({at[0], at[1]});
      if (rule == rules.end() || rule->second.rank >= best_rule.rank) continue;
      best = i;
      best_rule = rule->second;
    }
    if (best < 0) return symbols;
    symbols[static_cast<size_t>(best)] = best_rule.merged;
    symbols.erase(symbols.begin() + best + 1);
  }
}

TEST(BpeMergesTest, MatchesPlainTwin) {
  std::mt19937_64 rng(testing_support::TestSeed());
  BpeMerges::Scratch scratch;
  for (int round = 0; round < 300; ++round) {
    Rules rules;
    BpeMerges merges;
    const int32_t alphabet = 1 + static_cast<int32_t>(rng() % 4);
    int32_t next_symbol = alphabet;
    const int num_rules = static_cast<int>(rng() % 30);
    for (int i = 0; i < num_rules; ++i) {
      const auto symbol = [&] {
        return static_cast<int32_t>(rng() % static_cast<uint64_t>(next_symbol));
      };
      const std::pair<int32_t, int32_t> pair = {symbol(), symbol()};
      // Equal ranks, as equal scores give, are decided by position.
      const auto rank = static_cast<int32_t>(rng() % 8);
      if (!rules.emplace(pair, Rule{rank, next_symbol}).second) continue;
      merges.Add(pair.first, pair.second, rank, next_symbol);
      ++next_symbol;
    }
    for (const int length : {0, 1, 2, 3, 17, 100}) {
      std::vector<int32_t> symbols;
      for (int i = 0; i < length; ++i) {
        symbols.push_back(static_cast<int32_t>(rng() % static_cast<uint64_t>(alphabet)));
      }
      const std::vector<int32_t> expected = MergePlainly(rules, symbols);
      merges.Apply(&symbols, &scratch);
      ASSERT_EQ(symbols, expected) << "round " << round << ", length " << length;
    }
  }
}

TEST(BpeMergesTest, KeepsTheLowestRankOfAPair) {
  BpeMerges merges;
  merges.Add(0, 1, 5, 10);
  merges.Add(0, 1, 3, 11);
  merges.Add(0, 1, 4, 12);
  std::vector<int32_t> symbols = {0, 1};
  BpeMerges::Scratch scratch;
  merges.Apply(&symbols, &scratch);
  EXPECT_EQ(symbols, std::vector<int32_t>{11});
}

}  // namespace
}  // namespace writescope::tokenizer
