// A dead worker, a stalled pump, a lost flag: the step fails with a status within about the wait
// limit, and the next one works once everybody is back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <thread>

#include "absl/time/clock.h"
#include "tests/support/attention_scenes.h"
#include "tests/support/faulty_device.h"
#include "tests/support/tries.h"

namespace writescope::attention {
namespace {

using testing::AddBatch;
using testing::AttentionRig;
using testing::DecodeRequest;
using ::testing::HasSubstr;
using testing::StepOutput;
using testing::StepRequest;

#ifdef __SANITIZE_THREAD__
constexpr absl::Duration kWaitLimit = absl::Milliseconds(500);
#else
constexpr absl::Duration kWaitLimit = absl::Milliseconds(200);
#endif

struct FailureCase {
  std::string name;
  bool meet;
  int micro_batches;
};
void PrintTo(const FailureCase& c, std::ostream* out) { *out << c.name; }

class AttentionFailureTest : public ::testing::TestWithParam<FailureCase> {
 protected:
  AttentionFailureTest()
      : rig_(Options(), [this](std::unique_ptr<device::CpuDevice> inner) {
          auto faulty = std::make_unique<testing::FaultyDevice>(std::move(inner));
          device_ = faulty.get();
          return faulty;
        }) {
    slots_ = AddBatch(rig_, 128, {600, 500, 400}, 3);
  }
  static testing::AttentionRigOptions Options() {
    testing::AttentionRigOptions options =
        testing::RigOptions(testing::AllShapes()[0], {"", {3, 8, 16, 8}});
    options.wait_limit = kWaitLimit;
    options.cache.wait_limit = kWaitLimit;
    options.cache.num_layers = 4;
    return options;
  }
  static StepRequest RequestOf(const std::vector<int>& slots) {
    StepRequest request =
        DecodeRequest(slots, {.meet = GetParam().meet, .cpu_share = 0.5, .handoff = true});
    if (GetParam().micro_batches == 2) request.first_parts = 1;
    return request;
  }
  StepRequest Request() const { return RequestOf(slots_); }
  // What a step says that has waited for this turn's blocks.
  static std::string NothingForTurn(int turn) {
    return "the link delivered nothing for layer " +
           std::to_string(turn / GetParam().micro_batches);
  }
  // Runs a step that must fail, and says how long it took.
  absl::Duration Fail(const std::string& message) {
    const absl::Time start = absl::Now();
    const StepOutput output = rig_.Run(Request());
    const absl::Duration took = absl::Now() - start;
    EXPECT_TRUE(absl::IsDeadlineExceeded(output.status)) << output.status;
    EXPECT_THAT(std::string(output.status.message()), HasSubstr(message));
    return took;
  }
  // As if nothing had been.
  void ExpectNextStepsWork() {
    rig_.hybrid().SetClaimHook(nullptr);
    ASSERT_TRUE(rig_.hybrid().Ok());
    for (int i = 0; i < 5; ++i) {
      StepRequest request = Request();
      request.keep = true;
      const std::vector<testing::PlainOutput> plain = rig_.Plain(request);
      const StepOutput output = testing::WithTries([&] { return rig_.Run(request); });
      ASSERT_TRUE(output.status.ok()) << output.status;
      const AttentionRig::Worst worst = rig_.Compare(output, plain);
      ASSERT_LE(worst.ratio, 1) << worst.where;
    }
    for (const int slot : slots_) EXPECT_EQ(rig_.cache().CheckContents(slot), "");
    EXPECT_EQ(rig_.cache().blocks().moved_bytes(), 0);
  }

  testing::FaultyDevice* device_ = nullptr;
  AttentionRig rig_;
  std::vector<int> slots_;
};

TEST_P(AttentionFailureTest, DeadWorkersFailTheStepInTime) {
  // The first to claim dies with that in its hands, the others at once: what it took is lost.
  std::atomic<int> claims{0};
  rig_.hybrid().SetClaimHook([&](Side side, int) { return side == Side::kLink || ++claims == 1; });
  const absl::Duration took = Fail("the CPU's part of attention");
  EXPECT_GE(took, kWaitLimit * 0.9);
  EXPECT_LT(took, kWaitLimit * 10);
  ExpectNextStepsWork();
}

TEST_P(AttentionFailureTest, WorkersThatNeverClaimFailTheStepInTime) {
  rig_.hybrid().SetClaimHook([](Side side, int turn) { return side == Side::kLink || turn < 2; });
  EXPECT_LT(Fail("the CPU's part of attention"), kWaitLimit * 10);
  ExpectNextStepsWork();
}

// The pump waits for slots that are never read, and the engine for what the pump would bring.
TEST_P(AttentionFailureTest, ABrokenDeviceEndsTheStepInTime) {
  device_->is_broken = true;
  const absl::Time start = absl::Now();
  const StepOutput output = rig_.Run(Request());
  EXPECT_LT(absl::Now() - start, kWaitLimit * 40);
  EXPECT_FALSE(output.status.ok());
  EXPECT_FALSE(rig_.hybrid().Ok());
  device_->is_broken = false;  // So that what is left can end
}

// One worker is enough: the others' share is claimed by it.
TEST_P(AttentionFailureTest, AWorkerThatIsNotThereIsNoLoss) {
  std::atomic<int> claims{0};
  rig_.hybrid().SetClaimHook([&](Side side, int) { return side == Side::kLink || ++claims != 1; });
  const StepRequest request = Request();
  const std::vector<testing::PlainOutput> plain = rig_.Plain(request);
  const StepOutput output = testing::WithTries([&] {
    claims = 0;
    return rig_.Run(request);
  });
  ASSERT_TRUE(output.status.ok()) << output.status;
  EXPECT_LE(rig_.Compare(output, plain).ratio, 1);
}

TEST_P(AttentionFailureTest, DeadPumpFailsTheStepInTime) {
  for (const int last_turn : {-1, 0, 2}) {
    rig_.hybrid().SetClaimHook(
        [=](Side side, int turn) { return side == Side::kCpu || turn <= last_turn; });
    const absl::Duration took = Fail(NothingForTurn(last_turn + 1));
    EXPECT_GE(took, kWaitLimit * 0.9);
    EXPECT_LT(took, kWaitLimit * 10);
    ExpectNextStepsWork();
  }
}

// Work that is done while a step waits does not hide that nothing comes.
TEST_P(AttentionFailureTest, WaitingEndsAlsoWhereOtherWorkIsDoneMeanwhile) {
  int waits = 0;
  rig_.SetBetween([&](const std::function<bool()>& still_waiting) {
    ++waits;
    while (still_waiting()) absl::SleepFor(absl::Microseconds(100));
  });
  for (const Side dead : {Side::kLink, Side::kCpu}) {
    rig_.hybrid().SetClaimHook([=](Side side, int turn) { return side != dead || turn < 1; });
    EXPECT_LT(Fail(dead == Side::kLink ? NothingForTurn(1) : "the CPU's part of attention"),
              kWaitLimit * 10);
    ExpectNextStepsWork();
  }
  EXPECT_GT(waits, 0);
}

// Of two failures in one step none is left over for the next.
TEST_P(AttentionFailureTest, BothSidesDead) {
  rig_.hybrid().SetClaimHook([](Side side, int turn) { return side == Side::kLink && turn < 2; });
  const absl::Time start = absl::Now();
  const StepOutput output = rig_.Run(Request());
  EXPECT_TRUE(absl::IsDeadlineExceeded(output.status)) << output.status;
  EXPECT_LT(absl::Now() - start, kWaitLimit * 10);
  ExpectNextStepsWork();
}

TEST_P(AttentionFailureTest, StalledPumpFailsTheStepAndComesBack) {
  std::atomic<bool> stalled{false};
  rig_.hybrid().SetClaimHook([&](Side side, int turn) {
    if (side == Side::kLink && turn == 1 && !stalled.exchange(true)) {
      absl::SleepFor(kWaitLimit * 2);
    }
    return true;
  });
  EXPECT_LT(Fail(NothingForTurn(1)), kWaitLimit * 10);
  EXPECT_TRUE(stalled);
  ExpectNextStepsWork();
}

TEST_P(AttentionFailureTest, StalledWorkerFailsTheStepAndComesBack) {
  std::atomic<int> claims{0};
  rig_.hybrid().SetClaimHook([&](Side side, int turn) {
    // Sleeps with a claim made and not reported.
    if (side == Side::kCpu && turn == 1 && ++claims == 2) absl::SleepFor(kWaitLimit * 2);
    return true;
  });
  const StepRequest request = Request();
  const StepOutput output = rig_.Run(request);
  // The other worker may have done all of the layer, so that the sleeper had nothing in its hands.
  if (!output.status.ok()) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(output.status)) << output.status;
  }
  ExpectNextStepsWork();
}

TEST_P(AttentionFailureTest, LostFlagFailsTheStepInTime) {
  device_->lose_flags = true;
  const absl::Duration took = Fail("the CPU's part of attention");
  // Every turn waits, and only the first takes its time.
  EXPECT_GE(took, kWaitLimit * 0.9);
  EXPECT_LT(took, kWaitLimit * 3.5);
  device_->lose_flags = false;
  ExpectNextStepsWork();
}

TEST_P(AttentionFailureTest, AThreadThatDoesNotComeBackIsToldByOk) {
  // Owned by the hook: the thread is still inside when this test has ended.
  auto go = std::make_shared<std::latch>(1);
  auto first = std::make_shared<std::atomic<bool>>(true);
  rig_.hybrid().SetClaimHook([=](Side side, int) {
    if (side == Side::kLink && first->exchange(false)) go->wait();
    return true;
  });
  const absl::Time start = absl::Now();
  EXPECT_FALSE(rig_.Run(Request()).status.ok());
  EXPECT_FALSE(rig_.hybrid().Ok());
  EXPECT_LT(absl::Now() - start, kWaitLimit * 40);
  go->count_down();  // So that the rig can end
}

// It goes on where it was, and submits copies, while its owner is being taken down.
TEST_P(AttentionFailureTest, AThreadThatComesBackAtTheEndFindsItsMemory) {
  testing::AttentionRigOptions options = Options();
  options.cache.blocks = {12, 6, 20, 6};
  options.cache.prefix_cache = false;
  auto rig = std::make_unique<AttentionRig>(options);
  // With room on the device for copies that are kept: those need no slot of the ring.
  const std::vector<int> first = AddBatch(*rig, 0, {12 * 64}, 5);
  const std::vector<int> slots = AddBatch(*rig, 0, {900, 700}, 6);
  rig->cache().Remove(first[0]);
  ASSERT_TRUE(rig->cache().device().SetLinkPace(2e6).ok());  // A block takes 16 ms.
  auto go = std::make_shared<std::latch>(1);
  rig->hybrid().SetClaimHook([go](Side side, int) {
    if (side == Side::kLink) go->wait();
    return true;
  });
  StepRequest request = RequestOf(slots);
  request.retain_keep_free = 0;
  EXPECT_FALSE(rig->Run(request).status.ok());
  EXPECT_FALSE(rig->hybrid().Ok());
  std::thread late([go] {
    absl::SleepFor(absl::Milliseconds(50));
    go->count_down();
  });
  rig.reset();
  late.join();
}

TEST_P(AttentionFailureTest, CancelledBetweenLayers) {
  // As a runner does when every request of the step was cancelled: some layers are never submitted.
  int calls = 0;
  rig_.SetBetween([&](const std::function<bool()>&) {
    if (++calls == 2) rig_.hybrid().SetClaimHook(nullptr);
  });
  StepRequest request = Request();
  request.stop_before_turn = 2;
  const StepOutput output = rig_.Run(request);
  EXPECT_TRUE(absl::IsCancelled(output.status)) << output.status;
  ExpectNextStepsWork();
}

// The device's dense work may take longer than any wait limit, with the ring full meanwhile.
TEST_P(AttentionFailureTest, SlowDeviceIsNoFailure) {
  int calls = 0;
  int launches = 0;
  rig_.SetBetween([&](const std::function<bool()>&) {
    if (++calls % 4 == 2 && launches < 3) {
      ++launches;
      rig_.cache().device().compute().Launch([] { absl::SleepFor(kWaitLimit * 2.5); });
    }
  });
  StepRequest request = Request();
  request.share.cpu_share = 0;  // All through the ring, which has room for a part of a layer
  const std::vector<testing::PlainOutput> plain = rig_.Plain(request);
  const StepOutput output = testing::WithTries([&] {
    calls = launches = 0;
    return rig_.Run(request);
  });
  ASSERT_TRUE(output.status.ok()) << output.status;
  EXPECT_EQ(launches, 3);
  EXPECT_LE(rig_.Compare(output, plain).ratio, 1);
}

INSTANTIATE_TEST_SUITE_P(Cut, AttentionFailureTest,
                         ::testing::Values(FailureCase{"Planned", false, 1},
                                           FailureCase{"Meet", true, 1},
                                           FailureCase{"PlannedPingPong", false, 2},
                                           FailureCase{"MeetPingPong", true, 2}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace writescope::attention
