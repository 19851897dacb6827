#include "server/parse_units.h"

#include <gtest/gtest.h>

namespace writescope::server {
namespace {

TEST(ParseByteSize, UnderstandsUnits) {
  EXPECT_EQ(ParseByteSize("0").value(), 0);
  EXPECT_EQ(ParseByteSize("1073741824").value(), 1073741824);
  EXPECT_EQ(ParseByteSize("12B").value(), 12);
  EXPECT_EQ(ParseByteSize("40MiB").value(), int64_t{40} << 20);
  EXPECT_EQ(ParseByteSize("1.5GiB").value(), int64_t{3} << 29);
  EXPECT_EQ(ParseByteSize("32GB").value(), 32'000'000'000);
  EXPECT_EQ(ParseByteSize("2TiB").value(), int64_t{2} << 40);
  EXPECT_EQ(ParseByteSize("7kB").value(), 7000);
}

TEST(ParseByteSize, RefusesTheRest) {
  for (const char* text : {"", "GiB", "-1", "1.5", "1 GiB", "12gib", "1GiBs", "1.2.3MiB", "nan",
                           "inf", "1e3", "9000000TiB", "."}) {
    const auto size = ParseByteSize(text);
    EXPECT_FALSE(size.ok()) << text << " gave " << *size;
  }
  EXPECT_NE(ParseByteSize("12gib").status().message().find("no unit 'gib'"), std::string::npos);
}

TEST(FormatByteSize, PicksAUnit) {
  EXPECT_EQ(FormatByteSize(640), "640 B");
  EXPECT_EQ(FormatByteSize(1536), "1.5 KiB");
  EXPECT_EQ(FormatByteSize(5e12), "4.5 TiB");
}

TEST(ParseTimeSpan, UnderstandsUnits) {
  EXPECT_EQ(ParseTimeSpan("2").value(), absl::Seconds(2));
  EXPECT_EQ(ParseTimeSpan("0.5").value(), absl::Milliseconds(500));
  EXPECT_EQ(ParseTimeSpan("500ms").value(), absl::Milliseconds(500));
  EXPECT_EQ(ParseTimeSpan("1h30m").value(), absl::Minutes(90));
  EXPECT_EQ(ParseTimeLimit("inf").value(), absl::InfiniteDuration());
}

TEST(ParseTimeSpan, RefusesTheRest) {
  for (const char* text : {"", "-1", "-2s", "inf", "nan", "two", "5 minutes"}) {
    EXPECT_FALSE(ParseTimeSpan(text).ok()) << text;
  }
}

TEST(ParseShareBounds, NeedsTwoSharesInOrder) {
  EXPECT_EQ(ParseShareBounds("0.3,0.75").value().min_share, 0.3);
  EXPECT_EQ(ParseShareBounds("0.3,0.75").value().max_share, 0.75);
  for (const char* text : {"", "0.5", "0.8,0.2", "-0.1,1", "0,1.1", "nan,1", "0,nan", "0,1,1"}) {
    EXPECT_FALSE(ParseShareBounds(text).ok()) << text;
  }
}

}  // namespace
}  // namespace writescope::server
