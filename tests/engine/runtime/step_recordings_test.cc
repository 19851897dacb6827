#include "engine/runtime/step_recordings.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace writescope::runtime {
namespace {

class NamedRecording final : public ops::Recording {
 public:
  explicit NamedRecording(std::string name) : name(std::move(name)) {}
  const std::string name;
};

// Writes down what runs; a call between BeginRecording and EndRecording does not.
class FakeRecorder final : public ops::Recorder {
 public:
  absl::Status BeginRecording() override {
    if (!begin.ok()) return begin;
    recording_ = true;
    recorded_.clear();
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<ops::Recording>> EndRecording() override {
    recording_ = false;
    if (!end.ok()) return end;
    return std::make_unique<NamedRecording>(recorded_);
  }
  void Replay(const ops::Recording& recording) override {
    ran.push_back("replay " + static_cast<const NamedRecording&>(recording).name);
  }
  void Call(const std::string& name) {
    if (recording_) {
      recorded_ += name;
    } else {
      ran.push_back(name);
    }
  }

  absl::Status begin, end;
  std::vector<std::string> ran;

 private:
  bool recording_ = false;
  std::string recorded_;
};

class StepRecordingsTest : public ::testing::Test {
 protected:
  // What the step came to.
  std::string Step(StepRecordings& recordings, int rows) {
    recorder_.ran.clear();
    recordings.Begin(StepShape{.rows = rows}, 1).Submit([&] {
      recorder_.Call("step of " + std::to_string(rows));
    });
    EXPECT_EQ(recorder_.ran.size(), 1u);
    return recorder_.ran.empty() ? "" : recorder_.ran[0];
  }
  FakeRecorder recorder_;
};

TEST_F(StepRecordingsTest, RecordsASizeThatComesAgain) {
  StepRecordings recordings(recorder_, 4);
  EXPECT_EQ(Step(recordings, 2), "step of 2");
  EXPECT_EQ(Step(recordings, 3), "step of 3");
  EXPECT_EQ(Step(recordings, 2), "replay step of 2");
  EXPECT_EQ(Step(recordings, 2), "replay step of 2");
  EXPECT_EQ(Step(recordings, 3), "replay step of 3");
  EXPECT_EQ(recordings.counts().replayed_steps, 3);
  EXPECT_EQ(recordings.counts().plain_steps, 2);
  EXPECT_EQ(recordings.counts().failures, 0);
  EXPECT_EQ(recordings.num_kept(), 2);
}

TEST_F(StepRecordingsTest, KeepsNoMoreThanItMayAndThoseInUse) {
  StepRecordings recordings(recorder_, 2);
  for (const int rows : {1, 1, 2, 2}) Step(recordings, rows);
  for (int i = 0; i < 31; ++i) {
    EXPECT_EQ(Step(recordings, 3), "step of 3");  // Both others were used a short while ago.
    EXPECT_EQ(Step(recordings, 2), "replay step of 2");
  }
  EXPECT_EQ(Step(recordings, 3), "replay step of 3");  // In place of 1
  EXPECT_EQ(recordings.num_kept(), 2);
  EXPECT_EQ(Step(recordings, 2), "replay step of 2");
  EXPECT_EQ(Step(recordings, 1), "step of 1");
}

TEST_F(StepRecordingsTest, GoesOnCallByCallAfterAFailure) {
  for (const bool at_begin : {true, false}) {
    StepRecordings recordings(recorder_, 4);
    for (const int rows : {5, 5}) Step(recordings, rows);
    (at_begin ? recorder_.begin : recorder_.end) = absl::InternalError("no");
    Step(recordings, 1);
    EXPECT_EQ(Step(recordings, 1), "step of 1");
    recorder_.begin = recorder_.end = absl::OkStatus();
    EXPECT_EQ(Step(recordings, 1), "step of 1");
    EXPECT_EQ(recordings.counts().failures, 1);
    EXPECT_EQ(Step(recordings, 5), "replay step of 5");  // What there is stays in use.
  }
}

TEST_F(StepRecordingsTest, KeepsTheTwoKindsOfStepsApart) {
  StepRecordings recordings(recorder_, 4);
  for (const char* ran : {"spilled", "replay spilled"}) {
    recorder_.ran.clear();
    recordings.Begin(StepShape{.spilled = true, .rows = 2}, 1).Submit([&] {
      recorder_.Call("spilled");
    });
    EXPECT_EQ(recorder_.ran, std::vector<std::string>{ran});
  }
  EXPECT_EQ(Step(recordings, 2), "step of 2");
  EXPECT_EQ(Step(recordings, 2), "replay step of 2");
  EXPECT_EQ(recordings.num_kept(), 2);
}

TEST_F(StepRecordingsTest, OneWithSpilledKvTakesThePlacesOfSeveral) {
  StepRecordings recordings(recorder_, 4);
  const auto spilled = [&] {
    recorder_.ran.clear();
    recordings.Begin(StepShape{.spilled = true, .rows = 9}, 1).Submit([&] { recorder_.Call("s"); });
    return recorder_.ran[0];
  };
  for (const int rows : {1, 1, 2, 2, 3, 3}) Step(recordings, rows);
  EXPECT_EQ(recordings.num_kept(), 3);
  for (int i = 0; i < 70; ++i) Step(recordings, 1);
  for (const char* ran : {"s", "replay s"}) EXPECT_EQ(spilled(), ran);
  EXPECT_EQ(recordings.num_kept(), 2);  // The two that were idle are gone.
  EXPECT_EQ(Step(recordings, 1), "replay step of 1");
  // One that would cost more than all may never has a place.
  StepRecordings small(recorder_, 2);
  for (int i = 0; i < 3; ++i) {
    recorder_.ran.clear();
    small.Begin(StepShape{.spilled = true, .rows = 9}, 1).Submit([&] { recorder_.Call("s"); });
    EXPECT_EQ(recorder_.ran[0], "s");
  }
}

TEST_F(StepRecordingsTest, ReplaysEachPartInItsPlace) {
  StepRecordings recordings(recorder_, 4);
  const auto run = [&](const std::vector<std::string>& parts) {
    recorder_.ran.clear();
    StepRecordings::Step step = recordings.Begin(StepShape{.spilled = true, .rows = 2}, 3);
    for (const std::string& part : parts) step.Submit([&] { recorder_.Call(part); });
    return recorder_.ran;
  };
  using Ran = std::vector<std::string>;
  EXPECT_EQ(run({"a", "b", "c"}), (Ran{"a", "b", "c"}));
  // Given up: its beginning is no step.
  EXPECT_EQ(run({"a", "b"}), (Ran{"replay a", "replay b"}));
  EXPECT_EQ(recordings.num_kept(), 0);
  EXPECT_EQ(run({"a", "b", "c"}), (Ran{"replay a", "replay b", "replay c"}));
  EXPECT_EQ(run({"x", "y", "z"}), (Ran{"replay a", "replay b", "replay c"}));
  EXPECT_EQ(recordings.counts().replayed_steps, 3);
  EXPECT_EQ(recordings.num_kept(), 1);
}

TEST_F(StepRecordingsTest, APartThatCannotBeRecordedMakesTheRestPlain) {
  StepRecordings recordings(recorder_, 4);
  for (int i = 0; i < 2; ++i) {
    recorder_.ran.clear();
    StepRecordings::Step step = recordings.Begin(StepShape{.spilled = true, .rows = 2}, 3);
    for (const char* part : {"a", "b", "c"}) {
      recorder_.end = part == std::string("b") ? absl::InternalError("no") : absl::OkStatus();
      step.Submit([&] { recorder_.Call(part); });
    }
  }
  EXPECT_EQ(recorder_.ran, (std::vector<std::string>{"replay a", "b", "c"}));
  EXPECT_EQ(recordings.num_kept(), 0);
  EXPECT_EQ(recordings.counts().failures, 1);
  EXPECT_EQ(recordings.counts().plain_steps, 2);
}

TEST_F(StepRecordingsTest, WhatAStepUsesIsNotDroppedForOneInside) {
  StepRecordings recordings(recorder_, 3);
  const auto outer = [&](int inner_steps) {
    StepRecordings::Step step = recordings.Begin(StepShape{.spilled = true, .rows = 2}, 2);
    step.Submit([&] { recorder_.Call("a"); });
    for (int i = 0; i < inner_steps; ++i) EXPECT_EQ(Step(recordings, 7), "step of 7");
    recorder_.ran.clear();
    step.Submit([&] { recorder_.Call("b"); });
    return recorder_.ran[0];
  };
  EXPECT_EQ(outer(0), "b");
  EXPECT_EQ(outer(0), "replay b");
  EXPECT_EQ(outer(200), "replay b");
}

TEST_F(StepRecordingsTest, RecordsNothingWhereNoneMayBeKept) {
  StepRecordings recordings(recorder_, 0);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Step(recordings, 1), "step of 1");
  EXPECT_EQ(recordings.counts().failures, 0);
}

}  // namespace
}  // namespace writescope::runtime
