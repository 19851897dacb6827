#include "engine/base/command_line.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

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

TEST(CommandLineTest, NumbersOf64Bits) {
  for (const char* text : {"0", "7", "18446744073709551615"}) EXPECT_EQ(CheckUint64(text), "");
  for (const char* text : {"-1", "18446744073709551616", "1.5", "0x7", "010", "", "many"}) {
    EXPECT_EQ(CheckUint64(text),
              "'" + std::string(text) + "' is not a whole number from 0 to 18446744073709551615");
  }
}

TEST(CommandLineTest, WholeNumbersAndOthers) {
  for (const char* text : {"0", "-7", "100", "9223372036854775807"})
    EXPECT_EQ(CheckInt64(text), "");
  for (const char* text : {"", "-", "010", "-010", "0x10", "1e3", "9223372036854775808"}) {
    EXPECT_EQ(CheckInt64(text),
              "'" + std::string(text) +
                  "' is not a whole number from -9223372036854775808 to 9223372036854775807");
  }
  for (const char* text : {"0", "-0.5", "1e-3", ".5", "inf"}) EXPECT_EQ(CheckDouble(text), "");
  for (const char* text : {"", "x", "0.5x"}) {
    EXPECT_EQ(CheckDouble(text), "'" + std::string(text) + "' is not a number");
  }
}

TEST(CommandLineTest, NumbersOf32Bits) {
  EXPECT_EQ(CheckUint32("4294967295"), "");
  EXPECT_EQ(CheckUint32("4294967296"), "'4294967296' is not a whole number from 0 to 4294967295");
  EXPECT_EQ(CheckInt32("-2147483648"), "");
  EXPECT_EQ(CheckInt32("2147483648"),
            "'2147483648' is not a whole number from -2147483648 to 2147483647");
}

TEST(CommandLineTest, UnexpectedArgumentsAreNamed) {
  const Arguments flags = {"-n", "--max-tokens", "--max-sequences", "--worker", "--for"};
  const Arguments subcommands = {"generate", "health"};
  const auto explain = [&](const char* argument) {
    return ExplainUnexpected(argument, flags, subcommands);
  };
  EXPECT_EQ(explain("--max-token"), "'--max-token' is no flag here; did you mean --max-tokens?");
  EXPECT_EQ(explain("--wroker=x"), "'--wroker' is no flag here; did you mean --worker?");
  EXPECT_EQ(explain("-worker=x"), "'-worker' is no flag here; did you mean --worker?");
  EXPECT_EQ(explain("--max-seq"), "'--max-seq' is no flag here; did you mean --max-sequences?");
  EXPECT_EQ(explain("--colour"), "'--colour' is no flag here");
  EXPECT_EQ(explain("-x"), "'-x' is no flag here");
  EXPECT_EQ(explain("--for=1"),
            "'--for' stands in front of the subcommand that has it, or behind --");
  EXPECT_EQ(explain("genrate"), "'genrate' is no subcommand here; did you mean generate?");
  EXPECT_EQ(explain("help"), "'help' is no subcommand here");
  EXPECT_EQ(explain("-"), "'-' is no subcommand here");
  EXPECT_EQ(ExplainUnexpected("x", flags, {}), "'x' is one argument too many");
}

}  // namespace
}  // namespace writescope
