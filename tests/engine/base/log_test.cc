#include "engine/base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "absl/strings/str_split.h"

namespace writescope {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

template <typename Body>
std::string Logged(const Body& body) {
  ::testing::internal::CaptureStderr();
  body();
  return ::testing::internal::GetCapturedStderr();
}

TEST(Log, OneLineWithFields) {
  const std::string line = Logged([] {
    Log(LogLevel::kInfo, "request finished", {{"id", "r-1"}, {"tokens", 17}});
  });
  EXPECT_THAT(line, MatchesRegex("[0-9-]+T[0-9:.]+Z info request finished id=r-1 tokens=17\n"));
}

TEST(Log, QuotesWhatWouldBreakTheLine) {
  const auto field = [](const std::string& value) {
    return Logged([&] { Log(LogLevel::kWarning, "m", {{"k", value}}); });
  };
  EXPECT_THAT(field("plain-value.7"), EndsWith(" k=plain-value.7\n"));
  EXPECT_THAT(field(""), EndsWith(" k=\"\"\n"));
  EXPECT_THAT(field("two words"), EndsWith(" k=\"two words\"\n"));
  EXPECT_THAT(field("a=b"), EndsWith(" k=\"a=b\"\n"));
  EXPECT_THAT(field("say \"hi\""), EndsWith(" k=\"say \\\"hi\\\"\"\n"));
  EXPECT_THAT(field("back\\slash"), EndsWith(" k=\"back\\\\slash\"\n"));
  // A value cannot begin a line of its own: that would be a forged message.
  EXPECT_THAT(field("x\n2026 error forged"), EndsWith(" k=\"x\\n2026 error forged\"\n"));
  EXPECT_THAT(field("caf\xc3\xa9"), EndsWith(" k=caf\xc3\xa9\n"));
}

TEST(Log, DropsWhatIsBelowTheLevel) {
  SetLogLevel(LogLevel::kError);
  EXPECT_EQ(Logged([] { Log(LogLevel::kWarning, "quiet"); }), "");
  EXPECT_THAT(Logged([] { Log(LogLevel::kError, "loud"); }), HasSubstr(" error loud\n"));
  SetLogLevel(LogLevel::kDebug);
  EXPECT_THAT(Logged([] { Log(LogLevel::kDebug, "talk"); }), HasSubstr(" debug talk\n"));
  SetLogLevel(LogLevel::kInfo);
  EXPECT_EQ(Logged([] { Log(LogLevel::kDebug, "quiet"); }), "");
}

TEST(Log, ParsesLevels) {
  EXPECT_EQ(ParseLogLevel("debug"), LogLevel::kDebug);
  EXPECT_EQ(ParseLogLevel("info"), LogLevel::kInfo);
  EXPECT_EQ(ParseLogLevel("warning"), LogLevel::kWarning);
  EXPECT_EQ(ParseLogLevel("error"), LogLevel::kError);
  EXPECT_EQ(ParseLogLevel("Info"), std::nullopt);
  EXPECT_EQ(ParseLogLevel(""), std::nullopt);
}

TEST(Log, LinesOfThreadsStayWhole) {
  const std::string text = Logged([] {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([t] {
        const std::string value(200, static_cast<char>('a' + t));
        for (int i = 0; i < 50; ++i) Log(LogLevel::kInfo, "line", {{"v", value}});
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  const std::vector<std::string> lines = absl::StrSplit(text, '\n', absl::SkipEmpty());
  EXPECT_EQ(lines.size(), 200u);
  for (const std::string& line : lines) {
    const std::string value = line.substr(line.rfind('=') + 1);
    EXPECT_EQ(value, std::string(200, value[0])) << line;
  }
}

}  // namespace
}  // namespace writescope
