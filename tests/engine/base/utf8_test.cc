#include "engine/base/utf8.h"

#include <gtest/gtest.h>

#include <string>

namespace writescope {
namespace {

constexpr char kReplacement[] = "\xef\xbf\xbd";

TEST(Utf8, WholeTextStaysAsItIs) {
  for (const std::string& text :
       {std::string(), std::string("plain"), std::string("a\0b", 3), std::string("\x7f"),
        std::string("\xc2\x80"), std::string("\xe6\xad\xa3\xe5\xbd\x93"),
        std::string("\xed\x9f\xbf\xee\x80\x80"), std::string("\xf0\x9f\x98\x80"),
        std::string("\xf4\x8f\xbf\xbf")}) {
    EXPECT_TRUE(IsWholeUtf8(text));
    EXPECT_EQ(RepairUtf8(text), text);
  }
}

TEST(Utf8, BrokenTextIsFoundAndRepaired) {
  struct Case {
    std::string text;
    int replacements;
  };
  for (const Case& c : {Case{"\xe6\xad", 1},      // Two bytes of three
                        Case{"\xf0\x9f\x98", 1},  // Three of four
                        Case{"\x80", 1}, Case{"\xff", 1}, Case{"\xc0\xaf", 2},  // Overlong
                        Case{"\xe0\x80\xaf", 3}, Case{"\xed\xa0\x80", 3},       // Surrogate
                        Case{"\xf4\x90\x80\x80", 4},                            // Above U+10FFFF
                        Case{"\xe6\xad\xe6\xad", 2}}) {
    EXPECT_FALSE(IsWholeUtf8(c.text));
    std::string expected = "a";
    for (int i = 0; i < c.replacements; ++i) expected += kReplacement;
    expected += "z";
    EXPECT_EQ(RepairUtf8("a" + c.text + "z"), expected);
  }
}

}  // namespace
}  // namespace writescope
