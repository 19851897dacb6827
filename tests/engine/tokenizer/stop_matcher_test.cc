#include "engine/tokenizer/stop_matcher.h"

#include <gtest/gtest.h>

#include <chrono>
#include <random>

#include "tests/support/seed.h"

namespace writescope::tokenizer {
namespace {

struct Outcome {
  std::string shown;
  std::optional<int> stop;
};

// The plain twin: the shortest prefix of the text that ends with a stop string.
Outcome SearchPlainly(const std::vector<std::string>& stops, const std::string& text) {
  for (size_t end = 1; end <= text.size(); ++end) {
    const std::string_view prefix = std::string_view(text).substr(0, end);
    std::optional<int> longest;
    for (size_t i = 0; i < stops.size(); ++i) {
      if (!prefix.ends_with(stops[i])) continue;
      if (!longest || stops[i].size() > stops[static_cast<size_t>(*longest)].size()) {
        longest = static_cast<int>(i);
      }
    }
    if (longest) {
      return {text.substr(0, end - stops[static_cast<size_t>(*longest)].size()), longest};
    }
  }
  return {text, std::nullopt};
}

size_t LongestProperPrefixAtEnd(const std::vector<std::string>& stops, std::string_view text) {
  size_t longest = 0;
  for (const std::string& stop : stops) {
    for (size_t length = longest + 1; length < stop.size() && length <= text.size(); ++length) {
      if (text.ends_with(std::string_view(stop).substr(0, length))) longest = length;
    }
  }
  return longest;
}

StopMatcher Make(const std::vector<std::string>& stops) {
  auto matcher = StopMatcher::Create(stops);
  EXPECT_TRUE(matcher.ok()) << matcher.status();
  return *std::move(matcher);
}

TEST(StopMatcherTest, CutsExactlyAtTheMatch) {
  StopMatcher matcher = Make({"\nUser:", "beta gamma"});
  EXPECT_EQ(matcher.Push("alpha be"), "alpha ");
  EXPECT_EQ(matcher.Push("ta ga"), "");
  EXPECT_EQ(matcher.Push("mma delta"), "");
  EXPECT_EQ(matcher.matched_stop(), 1);
  EXPECT_EQ(matcher.Push("more"), "");
  EXPECT_EQ(matcher.Finish(), "");
}

TEST(StopMatcherTest, FlushesWhatNeverMatched) {
  StopMatcher matcher = Make({"\nUser:"});
  EXPECT_EQ(matcher.Push("hi\nUse"), "hi");
  EXPECT_EQ(matcher.Finish(), "\nUse");
  EXPECT_EQ(matcher.matched_stop(), std::nullopt);
}

TEST(StopMatcherTest, WithoutStopsEverythingPasses) {
  StopMatcher matcher = Make({});
  EXPECT_EQ(matcher.Push("any text"), "any text");
  EXPECT_EQ(matcher.Finish(), "");
}

TEST(StopMatcherTest, APrefixOfAnotherStopMatchesFirst) {
  StopMatcher matcher = Make({"abc", "ab"});
  EXPECT_EQ(matcher.Push("xabc"), "x");
  EXPECT_EQ(matcher.matched_stop(), 1);
}

TEST(StopMatcherTest, TheLongestOfThoseThatEndTogether) {
  StopMatcher matcher = Make({"b", "ab"});
  EXPECT_EQ(matcher.Push("xxab"), "xx");
  EXPECT_EQ(matcher.matched_stop(), 1);
}

TEST(StopMatcherTest, RefusesAnEmptyStop) {
  const std::vector<std::string> stops = {"a", ""};
  EXPECT_EQ(StopMatcher::Create(stops).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(StopMatcherTest, AnySplitGivesThePlainAnswer) {
  std::mt19937_64 rng(testing_support::TestSeed());
  for (int round = 0; round < 3000; ++round) {
    // Two letters: stops overlap themselves and each other.
    const auto random_string = [&](size_t min, size_t max) {
      std::string text(min + rng() % (max - min + 1), 'a');
      for (char& c : text) c = rng() % 3 == 0 ? 'b' : 'a';
      return text;
    };
    std::vector<std::string> stops;
    for (size_t i = rng() % 4; i > 0; --i) stops.push_back(random_string(1, 6));
    const std::string text = random_string(0, 40);
    const Outcome expected = SearchPlainly(stops, text);
    StopMatcher matcher = Make(stops);
    Outcome actual;
    for (size_t pos = 0; pos < text.size();) {
      const size_t length = 1 + rng() % 5;
      actual.shown += matcher.Push(std::string_view(text).substr(pos, length));
      pos = std::min(pos + length, text.size());
      if (matcher.matched_stop()) continue;
      // Held back is what must be, and no byte more.
      const std::string_view seen = std::string_view(text).substr(0, pos);
      ASSERT_EQ(actual.shown.size(), pos - LongestProperPrefixAtEnd(stops, seen));
    }
    actual.shown += matcher.Finish();
    ASSERT_EQ(actual.shown, expected.shown) << text;
    ASSERT_EQ(matcher.matched_stop(), expected.stop) << text;
  }
}

TEST(StopMatcherTest, LinearInATextThatNearlyMatchesEverywhere) {
  const size_t kBytes = size_t{1} << 20;
  StopMatcher matcher = Make({std::string(kBytes / 4, 'a') + "b"});
  std::string shown;
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < kBytes; ++i) shown += matcher.Push("a");
  shown += matcher.Finish();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(shown, std::string(kBytes, 'a'));
  // Moving the held text at every step would take 2^20 * 2^18 bytes: minutes.
  EXPECT_LT(elapsed.count(), 10);
}

}  // namespace
}  // namespace writescope::tokenizer
