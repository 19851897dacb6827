// How requests are let in and how they end, by what their callers are told.
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "engine/base/clock.h"
#include "engine/runtime/engine.h"
#include "engine/runtime/error_reason.h"
#include "tests/support/collect_sink.h"
#include "tests/support/demo_engine.h"

namespace writescope::runtime {
namespace {

using testing::CollectSink;
using testing::DemoOptions;
using testing::MakeEngine;
using testing::TextRequest;

TEST(EngineTest, ARequestThatFindsASlotDoesNotCountAsWaiting) {
  EngineOptions options = DemoOptions();
  options.max_queue = 1;
  const auto engine = MakeEngine(options);
  GenerateRequest request = TextRequest("The whale was", 2000);
  request.stopping.ignore_eos = true;
  // Faster than the engine can look at them.
  for (int i = 0; i < options.max_sequences + options.max_queue; ++i) {
    const auto id = engine->Submit(request, std::make_shared<CollectSink>());
    EXPECT_TRUE(id.ok()) << "request " << i << ": " << id.status();
  }
  const auto refused = engine->Submit(request, std::make_shared<CollectSink>());
  EXPECT_EQ(ErrorReason(refused.status()), "QUEUE_FULL") << refused.status();
}

TEST(EngineTest, BehindARequestWithoutRoomAllOthersWait) {
  EngineOptions options = DemoOptions();
  options.host_budget_bytes = 8 << 20;
  options.max_context_tokens = 4096;
  options.max_queue = 1;
  const auto engine = MakeEngine(options);
  ASSERT_NE(engine, nullptr);
  GenerateRequest request = TextRequest("The whale was", 4000);
  request.stopping.ignore_eos = true;
  EngineState state;
  for (int submitted = 1; submitted < options.max_sequences; ++submitted) {
    ASSERT_TRUE(engine->Submit(request, std::make_shared<CollectSink>()).ok());
    state = engine->state();
    for (int i = 0; i < 5000 && state.running_requests + state.held_requests < submitted; ++i) {
      absl::SleepFor(absl::Milliseconds(1));
      state = engine->state();
    }
    if (state.held_requests > 0) break;
  }
  ASSERT_EQ(state.held_requests, options.max_queue);
  const auto refused = engine->Submit(request, std::make_shared<CollectSink>());
  EXPECT_EQ(ErrorReason(refused.status()), "QUEUE_FULL") << refused.status();
}

TEST(EngineTest, AnAnswerThatLostItsEndIsNotOk) {
  EngineOptions options = DemoOptions();
  options.progress_interval = absl::InfiniteDuration();
  const auto engine = MakeEngine(options);
  GenerateRequest request = TextRequest("The whale was", 3);
  request.stopping.ignore_eos = true;
  // One for each token, and the one with the reason of the end.
  constexpr size_t kEvents = 4;
  for (size_t accepted = 0; accepted <= kEvents; ++accepted) {
    const auto sink = std::make_shared<CollectSink>();
    sink->RefuseEventsAfter(accepted);
    ASSERT_TRUE(engine->Submit(request, sink).ok());
    ASSERT_TRUE(sink->Await());
    if (accepted == kEvents) {
      EXPECT_TRUE(sink->status().ok()) << sink->status();
      EXPECT_EQ(sink->events().size(), kEvents);
    } else {
      EXPECT_EQ(ErrorReason(sink->status()), "SLOW_CONSUMER") << accepted << " events";
    }
  }
}

// Holds the engine thread at its first event.
class HoldingSink final : public GenerateSink {
 public:
  ~HoldingSink() override = default;
  bool OnEvent(GenerateEvent /*event*/) override {
    if (!held.HasBeenNotified()) held.Notify();
    go_on.WaitForNotification();
    return true;
  }
  void OnDone(const absl::Status& /*status*/) override {}

  absl::Notification held;
  absl::Notification go_on;
};

TEST(EngineTest, WhatAStepReadsIsShownAsRunningInIt) {
  EngineOptions options = DemoOptions();
  options.progress_interval = absl::InfiniteDuration();
  const auto engine = MakeEngine(options);
  const auto holding = std::make_shared<HoldingSink>();
  ASSERT_TRUE(engine->Submit(TextRequest("The whale was", 1), holding).ok());
  holding->held.WaitForNotification();
  const EngineState state = engine->state();
  holding->go_on.Notify();
  EXPECT_EQ(state.steps_total, 0);
  EXPECT_EQ(state.running_requests, 1);
  EXPECT_EQ(state.waiting_requests, 0);
}

TEST(EngineTest, ADeadlineIsTheReasonAlsoWhereTheServerCancels) {
  const auto engine = MakeEngine(DemoOptions());
  const auto holding = std::make_shared<HoldingSink>();
  ASSERT_TRUE(engine->Submit(TextRequest("The whale was", 1), holding).ok());
  holding->held.WaitForNotification();
  GenerateRequest request = TextRequest("The whale was", 1);
  request.deadline = Clock::Real().Now();
  const auto late = std::make_shared<CollectSink>();
  const auto late_id = engine->Submit(request, late);
  request.deadline = absl::InfiniteFuture();
  const auto gone = std::make_shared<CollectSink>();
  const auto gone_id = engine->Submit(request, gone);
  ASSERT_TRUE(late_id.ok() && gone_id.ok()) << late_id.status() << gone_id.status();
  engine->Cancel(*late_id);
  engine->Cancel(*gone_id);
  // One that was told to end before that, too.
  request.request_id = "aborted";
  request.deadline = Clock::Real().Now() + absl::Milliseconds(1);
  const auto aborted = std::make_shared<CollectSink>();
  ASSERT_TRUE(engine->Submit(request, aborted).ok());
  EXPECT_TRUE(engine->Abort("aborted"));
  while (Clock::Real().Now() <= request.deadline) absl::SleepFor(absl::Milliseconds(1));
  holding->go_on.Notify();
  ASSERT_TRUE(late->Await() && gone->Await() && aborted->Await());
  EXPECT_EQ(ErrorReason(aborted->status()), "DEADLINE_EXCEEDED") << aborted->status();
  EXPECT_EQ(ErrorReason(late->status()), "DEADLINE_EXCEEDED") << late->status();
  EXPECT_EQ(ErrorReason(gone->status()), "CANCELLED") << gone->status();
}

}  // namespace
}  // namespace writescope::runtime
