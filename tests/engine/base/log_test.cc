#include "engine/base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
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

TEST(Log, NoMessageBreaksTheLineOrTheEncoding) {
  const auto message = [](const std::string& text) {
    return Logged([&] { Log(LogLevel::kInfo, text, {{"k", text}}); });
  };
  // Messages hold names of files, and those may be anything.
  EXPECT_THAT(message("x\n2026 error forged"),
              EndsWith(" info x\\n2026 error forged k=\"x\\n2026 error forged\"\n"));
  EXPECT_THAT(message("\xff\xc3\xa9"),
              EndsWith(" info \xef\xbf\xbd\xc3\xa9 k=\xef\xbf\xbd\xc3\xa9\n"));
}

TEST(Log, ALongValueIsCut) {
  const auto field = [](const std::string& value) {
    return Logged([&] { Log(LogLevel::kInfo, "m", {{"k", value}, {"last", 1}}); });
  };
  const std::string longest(4096, 'x');
  EXPECT_THAT(field(longest), EndsWith(absl::StrCat(" k=", longest, " last=1\n")));
  EXPECT_THAT(field(longest + std::string(1 << 20, 'y')),
              EndsWith(absl::StrCat(" k=\"", longest, "... (1052672 bytes)\" last=1\n")));
}

// A stderr with a reader that sleeps, for as long as it lives.
class UnreadStderr {
 public:
  UnreadStderr() : saved_(dup(STDERR_FILENO)) {
    EXPECT_EQ(pipe(ends_), 0);
    dup2(ends_[1], STDERR_FILENO);
    close(ends_[1]);
  }
  ~UnreadStderr() {
    dup2(saved_, STDERR_FILENO);
    close(saved_);
    close(ends_[0]);
  }
  // What lies in the pipe.
  std::string Read() {
    std::string text(1 << 20, '\0');
    const ssize_t count = read(ends_[0], text.data(), text.size());
    text.resize(count < 0 ? 0 : static_cast<size_t>(count));
    return text;
  }

 private:
  int ends_[2] = {-1, -1};
  int saved_;
};

TEST(Log, AReaderThatSleepsHoldsNobodyUp) {
  UnreadStderr unread;
  const std::string value(4096, 'v');  // With it a line is longer than what a pipe takes at once.
  for (int i = 0; i < 1000; ++i) Log(LogLevel::kInfo, "line", {{"head", value}, {"value", value}});
  const std::string first = unread.Read();
  EXPECT_THAT(first, HasSubstr(" info line head=v"));
  Log(LogLevel::kInfo, "after");
  Log(LogLevel::kInfo, "and on");
  const std::vector<std::string> lines = absl::StrSplit(first + unread.Read(), '\n');
  ASSERT_GE(lines.size(), 5u);
  int64_t whole = 0;
  for (const std::string& line : lines) whole += absl::EndsWith(line, "=" + value) ? 1 : 0;
  EXPECT_THAT(lines.end()[-4],
              EndsWith(absl::StrCat(" warning nobody read the log, lines were dropped lines=",
                                    1000 - whole)));
  EXPECT_THAT(lines.end()[-3], EndsWith(" info after"));
  EXPECT_THAT(lines.end()[-2], EndsWith(" info and on"));
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
