// The worker and the controller as they are shipped, on the demo checkpoint: the share follows the
// link, and neither's death harms a request.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "tests/e2e/harness.h"
#include "tests/support/demo_prompt.h"
#include "writescope/v1/control.grpc.pb.h"
#include "writescope/v1/generation.grpc.pb.h"

namespace writescope::e2e {
namespace {

const std::string kModel = WRITESCOPE_SOURCE_DIR "/deploy/demo-model";

bool Soon(const std::function<bool()>& holds, absl::Duration limit = absl::Seconds(30)) {
  for (const absl::Time end = absl::Now() + limit; absl::Now() < end;) {
    if (holds()) return true;
    absl::SleepFor(absl::Milliseconds(20));
  }
  return false;
}

class TwoProcessesTest : public ::testing::Test {
 protected:
  void StartWorkerOn(const std::string& generation, const std::string& control) {
    // The planned cut: its share is what the controller says, so that moving it can be seen.
    auto worker =
        StartWorker(WORKER, {"--model=" + kModel, "--vram-budget=24MiB", "--host-budget=128MiB",
                             "--max-sequences=4", "--cut=planned", "--link-gbps=0.2", "--workers=1",
                             "--no-retention", "--listen=" + generation,
                             "--control-listen=" + control, "--metrics-listen=127.0.0.1:0"});
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
    generation_ = v1::GenerationService::NewStub(
        grpc::CreateChannel(worker_.generation, grpc::InsecureChannelCredentials()));
    control_ = v1::WorkerControlService::NewStub(
        grpc::CreateChannel(worker_.control, grpc::InsecureChannelCredentials()));
  }
  void SetUp() override {
    // With the plainest kernels the CPU's rate lies among the paces that a simulated link can keep,
    // on a fast machine too.
    setenv("WRITESCOPE_FORCE_ISA", "generic", 1);
    StartWorkerOn("127.0.0.1:0", "127.0.0.1:0");
  }

  std::unique_ptr<ChildProcess> StartController(const std::string& id) {
    auto controller = ChildProcess::Start(
        CONTROLLER, {"--worker=" + worker_.control, "--controller-id=" + id, "--interval=100ms",
                     "--lease=2s", absl::StrCat("--metrics-listen=127.0.0.1:", FreePort())});
    EXPECT_TRUE(controller.ok()) << controller.status();
    return *std::move(controller);
  }

  v1::GetWorkerStateResponse State() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    v1::GetWorkerStateResponse state;
    EXPECT_TRUE(control_->GetWorkerState(&context, {}, &state).ok());
    return state;
  }
  std::string Holder() { return State().share().controller_id(); }
  double PlannedShare() { return State().last_decode_step().planned_cpu_share(); }
  bool HolderIs(const std::string& id) {
    return Soon([&] { return Holder() == id; });
  }

  void SetPace(double bytes_per_second) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    v1::SetLinkPaceRequest request;
    request.set_bytes_per_second(bytes_per_second);
    v1::SetLinkPaceResponse response;
    EXPECT_TRUE(control_->SetLinkPace(&context, request, &response).ok());
  }

  // A request over mostly spilled KV that decodes until its client leaves or it has `max_tokens`.
  struct Running {
    grpc::ClientContext context;
    std::thread reader;
    grpc::Status status;
    std::atomic<size_t> num_tokens = 0;
    ~Running() {
      context.TryCancel();
      if (reader.joinable()) reader.join();
    }
  };
  std::unique_ptr<Running> Generate(uint32_t max_tokens) {
    auto running = std::make_unique<Running>();
    running->context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(280));
    running->reader = std::thread([this, max_tokens, r = running.get()] {
      v1::GenerateRequest request;
      request.set_text(testing::PlantedProse(testing::ReadText(kModel + "/prose.txt"), 24000,
                                             testing::RandomHarborCodes(2, 5)));
      request.mutable_sampling()->set_temperature(0);
      request.mutable_stopping()->set_max_tokens(max_tokens);
      request.mutable_stopping()->set_ignore_eos(true);
      auto stream = generation_->Generate(&r->context, request);
      for (v1::GenerateResponse message; stream->Read(&message);) {
        r->num_tokens += static_cast<size_t>(message.token_ids_size());
      }
      r->status = stream->Finish();
    });
    return running;
  }
  bool AwaitDecoding() {
    const uint64_t before = State().steps_total();
    return Soon([&] {
      const auto state = State();
      return state.steps_total() > before + 20 && state.last_decode_step().spilled_bytes() > 0;
    });
  }

  WorkerProcess worker_;
  std::unique_ptr<v1::GenerationService::Stub> generation_;
  std::unique_ptr<v1::WorkerControlService::Stub> control_;
};

TEST_F(TwoProcessesTest, TheShareMovesTheRightWayWhenTheLinkChanges) {
  const auto running = Generate(20000);
  const auto controller = StartController("c");
  ASSERT_TRUE(AwaitDecoding());
  ASSERT_TRUE(HolderIs("c")) << controller->output();
  // Steps of a few milliseconds on a busy machine: one share says little, the mean of two seconds
  // much.
  const auto mean_share = [&] {
    constexpr int kSamples = 40;
    double sum = 0;
    for (int i = 0; i < kSamples; ++i) {
      sum += PlannedShare();
      absl::SleepFor(absl::Milliseconds(50));
    }
    return sum / kSamples;
  };
  // No faster than a machine's memory, and too slow to be of use.
  constexpr double kFast = 6.4e9, kSlow = 0.05e9, kClearly = 0.02;
  SetPace(kFast);
  double fast = 1;
  ASSERT_TRUE(Soon([&] { return (fast = mean_share()) < 1 - 2 * kClearly; }))
      << "share " << fast << "\n"
      << controller->output();
  SetPace(kSlow);
  double slow = 0;
  ASSERT_TRUE(Soon([&] { return (slow = mean_share()) > fast + kClearly; }))
      << "share " << fast << ", " << slow << " over a slow link\n"
      << controller->output();
  SetPace(kFast);
  double again = 1;
  EXPECT_TRUE(Soon([&] { return (again = mean_share()) < slow - kClearly; }))
      << "share " << slow << ", " << again << " over a fast link\n"
      << controller->output();
  EXPECT_EQ(State().moved_bytes_total(), 0u);
}

TEST_F(TwoProcessesTest, AKilledControllerIsNotNoticedAndItsSuccessorTakesOver) {
  // A controller pushes once it has seen steps.
  const auto running = Generate(20000);
  auto first = StartController("first");
  ASSERT_TRUE(HolderIs("first")) << first->output();
  const auto second = StartController("second");
  // Stands by for longer than a lease.
  absl::SleepFor(absl::Seconds(3));
  EXPECT_EQ(Holder(), "first");
  const uint64_t generation = State().share().generation();
  first->Kill();
  EXPECT_TRUE(HolderIs("second"));
  EXPECT_GT(State().share().generation(), generation);
  // The first again: it stands by in turn.
  first = StartController("first");
  absl::SleepFor(absl::Seconds(3));
  EXPECT_EQ(Holder(), "second");
  const uint64_t by_second = State().share().generation();
  second->Kill();
  EXPECT_TRUE(HolderIs("first"));
  EXPECT_GT(State().share().generation(), by_second);
  // It goes on until its client leaves; how many tokens that are is the machine's business.
  const size_t so_far = running->num_tokens;
  EXPECT_TRUE(Soon([&] { return running->num_tokens > so_far; }));
  running->context.TryCancel();
  running->reader.join();
  EXPECT_EQ(running->status.error_code(), grpc::StatusCode::CANCELLED)
      << running->status.error_message();
}

TEST_F(TwoProcessesTest, WithoutAControllerTheWorkersOwnRooflineIsInForce) {
  auto controller = StartController("c");
  auto running = Generate(20000);
  ASSERT_TRUE(HolderIs("c")) << controller->output();
  running.reset();
  controller->Kill();
  EXPECT_TRUE(HolderIs(""));
  running = Generate(50);
  running->reader.join();
  EXPECT_TRUE(running->status.ok()) << running->status.error_message();
}

TEST_F(TwoProcessesTest, AControllerFindsARestartedWorker) {
  const auto controller = StartController("c");
  auto running = Generate(20000);
  ASSERT_TRUE(HolderIs("c")) << controller->output();
  running.reset();
  const std::string generation = worker_.generation;
  const std::string control = worker_.control;
  worker_.process->Kill();
  StartWorkerOn(generation, control);
  if (HasFatalFailure()) return;
  running = Generate(20000);
  EXPECT_TRUE(HolderIs("c")) << controller->output();
  EXPECT_TRUE(controller->running());
}

}  // namespace
}  // namespace writescope::e2e
