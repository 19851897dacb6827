// The decision log, and its replay.
#include "controller/decision_log.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "controller/replay.h"
#include "tests/support/temp_dir.h"

namespace writescope::controller {
namespace {

using ::testing::HasSubstr;

class DecisionLogTest : public testing::Test {
 protected:
  std::string Path() const { return dir_.File("decisions.jsonl"); }

  testing_support::TempDir dir_;
};

PolicyInput Input(double cpu_rate) {
  PolicyInput input;
  input.spec.rates = {cpu_rate * 1.2, cpu_rate, 53e9, 42e9, 2.5e12};
  input.spec.batches = {{8, 0.006, 0.001, 0.9}, {64, 0.01, 0.001, 0.9}};
  input.spec.max_spilled_bytes = uint64_t{1} << 37;
  input.batch_size = 8;
  input.spilled_bytes = 20000000000;
  input.allowed = {0.05, 0.95};
  input.num_steps_seen = 100;
  return input;
}

DecisionRecord Record(int index, double cpu_rate) {
  DecisionRecord record;
  record.time = absl::FromUnixMillis(1700000000123 + 250 * index);
  record.controller_id = "c \"quoted\"";
  record.worker_id = "w";
  record.meet = true;
  record.input = Input(cpu_rate);
  record.decision = Decide(PolicyOptions(), record.input);
  record.measured_step_seconds = 0.151;
  record.observed_share = 0.61;
  record.outcome = "applied";
  record.generation = 7;
  return record;
}

TEST_F(DecisionLogTest, RoundTrip) {
  const DecisionRecord record = Record(3, 94e9);
  const std::string line = DecisionToJson(record);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const auto read = DecisionFromJson(line);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(DecisionToJson(*read), line);
  EXPECT_EQ(read->time, record.time);
  EXPECT_EQ(read->decision.table, record.decision.table);
  EXPECT_EQ(read->input.spec.batches[1].ahead_fraction, 0.9);
  // The same input gives the same decision: what a replay stands on.
  EXPECT_EQ(Decide(PolicyOptions(), read->input).table, record.decision.table);
}

TEST_F(DecisionLogTest, WritesNumbersThatJsonLacks) {
  DecisionRecord record = Record(0, 94e9);
  record.measured_step_seconds = std::numeric_limits<double>::quiet_NaN();
  record.observed_share = std::numeric_limits<double>::infinity();
  record.worker_id = "bad \xff utf8";
  const auto read = DecisionFromJson(DecisionToJson(record));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->measured_step_seconds, -1);
}

TEST_F(DecisionLogTest, ErrorsNameTheField) {
  EXPECT_THAT(std::string(DecisionFromJson("{").status().message()),
              HasSubstr("not a JSON object"));
  std::string line = DecisionToJson(Record(0, 94e9));
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string copy = line;
    const size_t at = copy.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    copy.replace(at, from.size(), to);
    return std::string(DecisionFromJson(copy).status().message());
  };
  EXPECT_THAT(changed("\"cpu_alone\"", "\"cpu_lone\""), HasSubstr("field cpu_alone is missing"));
  EXPECT_THAT(changed("\"batch_size\":8", "\"batch_size\":\"8\""),
              HasSubstr("field batch_size has a wrong type"));
  EXPECT_THAT(changed("\"batches\":[[8,", "\"batches\":[[\"8\","), HasSubstr("field batches"));
  EXPECT_THAT(changed("\"action\":\"push\"", "\"action\":\"jump\""), HasSubstr("field action"));
  EXPECT_THAT(changed("\"time\":\"2023", "\"time\":\"yes"), HasSubstr("field time"));
  EXPECT_THAT(changed("\"max_batch\":8", "\"most\":8"), HasSubstr("field table"));
}

TEST_F(DecisionLogTest, EachLineIsInTheFileAtOnce) {
  auto log = DecisionLog::Create(Path(), 1 << 20);
  ASSERT_TRUE(log.ok()) << log.status();
  for (int i = 1; i <= 3; ++i) {
    ASSERT_TRUE((*log)->Append(Record(i, 94e9)).ok());
    std::ifstream file(Path());
    std::string line;
    int lines = 0;
    while (std::getline(file, line)) lines += DecisionFromJson(line).ok() ? 1 : 0;
    EXPECT_EQ(lines, i);
  }
}

TEST_F(DecisionLogTest, SizeIsBounded) {
  const size_t line_bytes = DecisionToJson(Record(0, 94e9)).size() + 1;
  const int64_t limit = static_cast<int64_t>(3 * line_bytes + 10);
  {
    auto log = DecisionLog::Create(Path(), limit);
    ASSERT_TRUE(log.ok());
    for (int i = 0; i < 20; ++i) ASSERT_TRUE((*log)->Append(Record(0, 94e9)).ok());
  }
  EXPECT_LE(std::filesystem::file_size(Path()), static_cast<uintmax_t>(limit));
  EXPECT_LE(std::filesystem::file_size(Path() + ".1"), static_cast<uintmax_t>(limit));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir_.path()), {}), 2);
  // A restart goes on where the last process stopped.
  const auto size = std::filesystem::file_size(Path());
  auto log = DecisionLog::Create(Path(), 1 << 20);
  ASSERT_TRUE((*log)->Append(Record(0, 94e9)).ok());
  EXPECT_EQ(std::filesystem::file_size(Path()), size + line_bytes);
}

TEST_F(DecisionLogTest, ErrorsAreReported) {
  const auto log = DecisionLog::Create(dir_.File("no/such/folder/log"), 1000);
  EXPECT_EQ(log.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(log.status().message()), HasSubstr("/no/such/folder/log"));
  EXPECT_EQ(DecisionLog::Create(Path(), 0).status().code(), absl::StatusCode::kInvalidArgument);
}

// A CPU that wobbles by 4 %, written by a loop with the usual policy.
std::string WobblingLog() {
  std::string log;
  std::optional<roofline::ShareTable> in_force;
  for (int i = 0; i < 200; ++i) {
    DecisionRecord record = Record(i, 94e9 * (1 + 0.04 * ((i / 10) % 2 == 0 ? 1 : -1)));
    record.input.in_force = in_force;
    record.decision = Decide(PolicyOptions(), record.input);
    if (record.decision.action != Action::kHold) in_force = record.decision.table;
    absl::StrAppend(&log, DecisionToJson(record), "\n");
  }
  return log;
}

TEST_F(DecisionLogTest, OnlyARegularFileIsWritten) {
  ASSERT_EQ(mkfifo(Path().c_str(), 0600), 0);
  // Without a reader it cannot be opened, with one it is refused.
  EXPECT_THAT(DecisionLog::Create(Path(), 1000).status().message(), HasSubstr("cannot be opened"));
  const int reader = open(Path().c_str(), O_RDONLY | O_NONBLOCK);
  EXPECT_THAT(DecisionLog::Create(Path(), 1000).status().message(),
              HasSubstr("not a regular file"));
  close(reader);
  EXPECT_THAT(DecisionLog::Create("/dev/null", 1000).status().message(),
              HasSubstr("not a regular file"));
}

int Pushes(const Replay& replay, bool logged) {
  int pushes = 0;
  for (const ReplayRow& row : replay.rows) {
    pushes += (logged ? row.logged_action : row.replayed_action) == Action::kPush ? 1 : 0;
  }
  return pushes;
}

TEST_F(DecisionLogTest, ReplayWithTheSamePolicyIsTheSame) {
  std::istringstream log(WobblingLog());
  const auto replay = ReplayLog(log, PolicyOptions());
  ASSERT_TRUE(replay.ok()) << replay.status();
  ASSERT_EQ(replay->rows.size(), 200u);
  for (const ReplayRow& row : replay->rows) {
    EXPECT_EQ(row.logged_action, row.replayed_action);
    EXPECT_NEAR(row.logged_share, row.replayed_share, 1e-9);
  }
}

TEST_F(DecisionLogTest, ReplayShowsWhatAnotherPolicyDoes) {
  std::istringstream log(WobblingLog());
  PolicyOptions lazy;
  lazy.hysteresis = 0.1;
  lazy.max_loss = 0.2;
  const auto replay = ReplayLog(log, lazy);
  ASSERT_TRUE(replay.ok()) << replay.status();
  EXPECT_GT(Pushes(*replay, true), 10);
  EXPECT_EQ(Pushes(*replay, false), 1);
  const std::string text = FormatReplay(*replay, 10);
  EXPECT_THAT(text, HasSubstr("200 decisions; pushes:"));
  EXPECT_THAT(text, HasSubstr("1 replayed"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1 + 10 + 3);
}

TEST_F(DecisionLogTest, ReplayPassesOverBrokenLines) {
  std::string text = WobblingLog();
  text = "not json\n" + text.substr(0, text.size() - 100);  // The last line is cut off.
  std::istringstream log(text);
  const auto replay = ReplayLog(log, PolicyOptions());
  ASSERT_TRUE(replay.ok());
  EXPECT_EQ(replay->rows.size(), 199u);
  EXPECT_EQ(replay->bad_lines, 2);
  EXPECT_THAT(FormatReplay(*replay, 5), HasSubstr("2 lines passed over"));
  std::istringstream nothing("x\ny\n");
  EXPECT_EQ(ReplayLog(nothing, PolicyOptions()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace writescope::controller
