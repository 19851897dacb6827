#include "engine/base/check.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"

namespace writescope {
namespace {

TEST(CheckDeathTest, SaysPlaceConditionAndValues) {
  const int have = 3;
  EXPECT_DEATH(CHECK_EQ(have, 4) << "blocks of " << 7,
               "check_test\\.cc:[0-9]+.*have.*==.*4.*3 vs\\. 4.*blocks of 7");
  EXPECT_DEATH(CHECK(have == 4), "have == 4");
}

TEST(Check, HasNoEffectWhenItHolds) {
  int evaluated = 0;
  CHECK(++evaluated == 1) << ++evaluated;
  CHECK_LT(evaluated, 2) << "not said";
  EXPECT_EQ(evaluated, 1);
  // As the body of an if without braces, an else must bind to the if.
  if (evaluated == 1)
    CHECK(true);
  else
    FAIL();
}

absl::StatusOr<int> Half(int n) {
  if (n % 2 != 0) return absl::InvalidArgumentError(absl::StrCat(n, " is odd"));
  return n / 2;
}
absl::StatusOr<int> Quarter(int n) {
  ASSIGN_OR_RETURN(const int half, Half(n));
  int quarter = 0;
  ASSIGN_OR_RETURN(quarter, Half(half));
  return quarter;
}
absl::Status CheckQuarter(int n) {
  RETURN_IF_ERROR(Quarter(n).status());
  return absl::OkStatus();
}

TEST(StatusMacros, PassValuesAndErrors) {
  EXPECT_EQ(*Quarter(12), 3);
  EXPECT_EQ(Quarter(6).status(), absl::InvalidArgumentError("3 is odd"));
  EXPECT_EQ(CheckQuarter(5), absl::InvalidArgumentError("5 is odd"));
  EXPECT_TRUE(CheckQuarter(8).ok());
}

}  // namespace
}  // namespace writescope
