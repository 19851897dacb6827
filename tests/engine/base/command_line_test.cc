#include "engine/base/command_line.h"

#include <gtest/gtest.h>

namespace writescope {
namespace {

using Arguments = std::vector<std::string>;

TEST(CommandLineTest, AnEmptyValueBecomesAnArgumentOfItsOwn) {
  EXPECT_EQ(WithEmptyValues({"--a=", "--b=1"}), (Arguments{"--a", "", "--b=1"}));
  EXPECT_EQ(WithEmptyValues({"--b=1", "--a="}), (Arguments{"--b=1", "--a", ""}));
}

TEST(CommandLineTest, EverythingElseStays) {
  const Arguments plain = {"run", "--a=b=", "--a", "-x=", "=", "--=", "", "a=", "--", "--a="};
  EXPECT_EQ(WithEmptyValues(plain), plain);
}

}  // namespace
}  // namespace writescope
