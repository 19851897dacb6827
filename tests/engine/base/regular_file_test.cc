#include "engine/base/regular_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <string>

#include "tests/support/temp_dir.h"

namespace writescope {
namespace {

using ::testing::HasSubstr;

TEST(RegularFile, IsReadWhole) {
  const testing_support::TempDir dir;
  std::string text(100'000, 'x');
  text[50'000] = '\0';
  std::ofstream(dir.File("a")) << text;
  std::ofstream(dir.File("empty"));
  EXPECT_EQ(*ReadRegularFile(dir.File("a"), 100'000), text);
  EXPECT_EQ(*ReadRegularFile(dir.File("empty"), 0), "");
}

TEST(RegularFile, ErrorsNameTheFile) {
  const testing_support::TempDir dir;
  std::ofstream(dir.File("a")) << "twelve bytes";
  ASSERT_EQ(mkfifo(dir.File("fifo").c_str(), 0600), 0);
  const auto none = ReadRegularFile(dir.File("none"), 1000).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(none.message(), HasSubstr(dir.File("none")));
  const auto large = ReadRegularFile(dir.File("a"), 11).status();
  EXPECT_EQ(large.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(large.message(), HasSubstr("12 bytes; at most 11"));
  // Nobody ever writes to this one.
  for (const std::string& path : {dir.File("fifo"), dir.path(), std::string("/dev/null")}) {
    const auto other = ReadRegularFile(path, 1000).status();
    EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition) << path;
    EXPECT_THAT(other.message(), HasSubstr("not a regular file")) << path;
  }
}

}  // namespace
}  // namespace writescope
