#include "engine/base/number_text.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace writescope {
namespace {

TEST(NumberTextTest, TellsAValueFromItsNeighbours) {
  EXPECT_EQ(NumberText(1.0), "1");
  EXPECT_EQ(NumberText(0.1f), "0.1");
  EXPECT_EQ(NumberText(0.1), "0.1");
  EXPECT_EQ(NumberText(-0.25), "-0.25");
  EXPECT_EQ(NumberText(std::nextafter(1.0f, 2.0f)), "1.0000001");
  EXPECT_EQ(NumberText(std::nextafter(1.0, 2.0)), "1.0000000000000002");
}

TEST(NumberTextTest, AnyValueHasOne) {
  EXPECT_EQ(NumberText(std::numeric_limits<float>::quiet_NaN()), "nan");
  EXPECT_EQ(NumberText(-std::numeric_limits<double>::infinity()), "-inf");
  EXPECT_EQ(NumberText(std::numeric_limits<double>::lowest()), "-1.7976931348623157e+308");
  EXPECT_EQ(NumberText(std::numeric_limits<float>::max()), "3.4028235e+38");
  EXPECT_EQ(NumberText(std::numeric_limits<float>::denorm_min()), "1e-45");
}

}  // namespace
}  // namespace writescope
