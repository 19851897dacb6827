#include "server/cli/terminal.h"

#include <gtest/gtest.h>

#include <limits>

#include "server/cli/generate.h"

namespace writescope::cli {
namespace {

TEST(Terminal, BarStaysInItsFrame) {
  EXPECT_EQ(Bar(0, 4), "[....]");
  EXPECT_EQ(Bar(0.5, 4), "[##..]");
  EXPECT_EQ(Bar(1, 4), "[####]");
  EXPECT_EQ(Bar(7, 4), "[####]");
  EXPECT_EQ(Bar(-1, 4), "[....]");
  EXPECT_EQ(Bar(std::numeric_limits<double>::quiet_NaN(), 4), "[....]");
}

TEST(Terminal, Numbers) {
  EXPECT_EQ(FormatRate(1.25e9), "1.2 GB/s");
  EXPECT_EQ(FormatRate(3e6), "3.0 MB/s");
  EXPECT_EQ(FormatRate(0), "-");
  EXPECT_EQ(FormatRate(std::numeric_limits<double>::infinity()), "-");
  EXPECT_EQ(FormatSpan(absl::Milliseconds(41)), "41.0ms");
  EXPECT_EQ(FormatSpan(absl::Seconds(8.25)), "8.2s");
  EXPECT_EQ(FormatSpan(absl::Seconds(192)), "3m12s");
  EXPECT_EQ(FormatSpan(absl::InfiniteDuration()), "-");
  EXPECT_EQ(FormatPercent(0.414), "41%");
}

TEST(ParseTokenIds, TakesSpacesAndCommas) {
  EXPECT_EQ(ParseTokenIds(" 1,2  3\n4,").value(), (std::vector<uint32_t>{1, 2, 3, 4}));
  EXPECT_TRUE(ParseTokenIds("").value().empty());
  for (const char* text : {"x", "1 -2", "1.5", "5000000000"}) {
    EXPECT_FALSE(ParseTokenIds(text).ok()) << text;
  }
}

}  // namespace
}  // namespace writescope::cli
