// writescope-worker itself, with the demo checkpoint: starts that fail, ends, errors, and requests
// that are left in the middle.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "server/status_mapping.h"
#include "tests/controller/http_get.h"
#include "tests/e2e/harness.h"
#include "tests/support/seed.h"
#include "tests/support/temp_dir.h"
#include "writescope/v1/control.grpc.pb.h"
#include "writescope/v1/generation.grpc.pb.h"

namespace writescope::e2e {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;

const char kSource[] = WRITESCOPE_SOURCE_DIR;
const std::string kModel = absl::StrCat(kSource, "/deploy/demo-model");

std::vector<std::string> Flags(std::vector<std::string> more = {}) {
  std::vector<std::string> flags = {"--model=" + kModel, "--vram-budget=24MiB",
                                    "--host-budget=128MiB", "--max-sequences=4", "--max-queue=64"};
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

// The checkpoint's own text, over and over.
std::string Prose(size_t bytes) {
  std::ifstream file(kModel + "/prose.txt");
  const std::string once((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  EXPECT_GT(once.size(), 1000u);
  std::string text;
  while (text.size() < bytes) text += once.substr(0, bytes - text.size());
  return text;
}

struct Answer {
  grpc::Status status;
  std::vector<v1::GenerateResponse> messages;
  std::string reason() const { return server::DescribeError(status).reason; }
};

class WorkerTest : public ::testing::Test {
 protected:
  void Start(std::vector<std::string> flags = {}) { StartAs(WORKER, Flags(std::move(flags))); }

  void StartAs(const std::string& program, std::vector<std::string> arguments) {
    auto worker = StartWorker(program, std::move(arguments));
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
    generation_ = v1::GenerationService::NewStub(
        grpc::CreateChannel(worker_.generation, grpc::InsecureChannelCredentials()));
    control_ = v1::WorkerControlService::NewStub(
        grpc::CreateChannel(worker_.control, grpc::InsecureChannelCredentials()));
  }

  static void SetDeadline(grpc::ClientContext& context,
                          absl::Duration timeout = absl::Seconds(60)) {
    context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  }

  Answer Generate(const v1::GenerateRequest& request, absl::Duration timeout = absl::Seconds(60)) {
    Answer answer;
    grpc::ClientContext context;
    SetDeadline(context, timeout);
    auto reader = generation_->Generate(&context, request);
    v1::GenerateResponse message;
    while (reader->Read(&message)) answer.messages.push_back(message);
    answer.status = reader->Finish();
    return answer;
  }

  v1::GetWorkerStateResponse State() {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::GetWorkerStateResponse state;
    EXPECT_TRUE(control_->GetWorkerState(&context, {}, &state).ok());
    return state;
  }

  // Whether a request is being computed before the timeout.
  bool AwaitRunning(absl::Duration timeout = absl::Seconds(20)) {
    const absl::Time end = absl::Now() + timeout;
    while (State().running_requests() == 0) {
      if (absl::Now() > end) return false;
      absl::SleepFor(absl::Milliseconds(1));
    }
    return true;
  }

  // Whether nothing is running or waiting, and no region has bytes in use, before the timeout.
  bool AllFree(absl::Duration timeout = absl::Seconds(20)) {
    const absl::Time end = absl::Now() + timeout;
    while (true) {
      const v1::GetWorkerStateResponse state = State();
      uint64_t used = state.running_requests() + state.waiting_requests();
      for (const v1::RegionState& region : state.regions()) used += region.used_bytes();
      if (used == 0) return true;
      if (absl::Now() > end) return false;
      absl::SleepFor(absl::Milliseconds(5));
    }
  }

  WorkerProcess worker_;
  std::unique_ptr<v1::GenerationService::Stub> generation_;
  std::unique_ptr<v1::WorkerControlService::Stub> control_;
};

v1::GenerateRequest Request(const std::string& text, uint32_t max_tokens) {
  v1::GenerateRequest request;
  request.set_text(text);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_tokens(max_tokens);
  request.mutable_stopping()->set_ignore_eos(true);
  return request;
}

TEST_F(WorkerTest, WhatIsPrintedForAFileThatCannotTakeItIsAnError) {
  for (const char* flag : {"--plan-only", "--print-config", "--help", "--version"}) {
    std::vector<std::string> arguments = {"-c", "exec \"$0\" \"$@\" > /dev/full", WORKER};
    for (std::string& word : Flags({flag})) arguments.push_back(std::move(word));
    const auto result = RunProgram("/bin/sh", std::move(arguments));
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->exit_code, 1) << flag;
    EXPECT_THAT(result->output, HasSubstr("could not be written")) << flag;
  }
}

TEST_F(WorkerTest, StartsThatFailSayWhy) {
  const testing_support::TempDir dir;
  const std::string truncated = dir.path() + "/truncated";
  std::filesystem::copy(kModel, truncated);
  std::filesystem::resize_file(truncated + "/model.safetensors",
                               std::filesystem::file_size(truncated + "/model.safetensors") - 1);
  const std::string missing = dir.path() + "/missing";
  std::filesystem::copy(kModel, missing);
  std::filesystem::remove(missing + "/model.safetensors");
  struct Case {
    std::vector<std::string> flags;
    int exit_code;
    std::string message;
  };
  for (const Case& c :
       {Case{{"--model=/no/such/folder", "--vram-budget=24MiB"}, 1, "/no/such/folder"},
        Case{{"--model=" + truncated, "--vram-budget=24MiB"}, 1, "model.safetensors"},
        Case{{"--model=" + missing, "--vram-budget=24MiB"}, 1, "safetensors"},
        Case{{"--model=" + kModel, "--vram-budget=4MiB"}, 1, "4.0 MiB"},
        Case{{"--model=" + kModel, "--vram-budget=4GiB", "--device=cuda:99"}, 1, "CUDA device"},
        Case{{"--model=" + kModel}, 2, "--vram-budget is required"},
        Case{{"--version"}, 0, "writescope-worker "}}) {
    const auto result = RunProgram(WORKER, c.flags);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->exit_code, c.exit_code) << result->output;
    EXPECT_THAT(result->output, HasSubstr(c.message));
  }
}

TEST_F(WorkerTest, SecondWorkerOnThePortFails) {
  Start();
  const auto second = RunProgram(WORKER, Flags({"--listen=" + worker_.generation}));
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->exit_code, 1);
  EXPECT_THAT(second->output, HasSubstr(worker_.generation));
}

TEST_F(WorkerTest, PlanIsPrintedAndPlanOnlyStopsThere) {
  const auto plan = RunProgram(WORKER, Flags({"--plan-only"}));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->exit_code, 0);
  EXPECT_THAT(plan->output, HasSubstr("weights"));
  EXPECT_THAT(plan->output, ::testing::Not(HasSubstr("LISTENING")));
  Start();
  const std::string output = worker_.process->output();
  EXPECT_LT(output.find("weights"), output.find("LISTENING"));
}

// Two requests at a time, whose decode steps can be split, and the counter of those that were.
TEST_F(WorkerTest, MicroBatchesCanBeAskedFor) {
  for (const char* micro_batches : {"1", "2"}) {
    Start({absl::StrCat("--micro-batches=", micro_batches)});
    const std::string text = Prose(40000);
    std::vector<Answer> answers(2);
    std::vector<std::thread> clients;
    for (size_t i = 0; i < answers.size(); ++i) {
      clients.emplace_back(
          [&, i] { answers[i] = Generate(Request(text.substr(i * 9000, 24000), 40)); });
    }
    for (std::thread& client : clients) client.join();
    for (const Answer& answer : answers) {
      EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
      EXPECT_EQ(answer.messages.back().usage().generated_tokens(), 40u);
    }
    const std::string metrics = controller::HttpGet(worker_.metrics, "/metrics");
    EXPECT_THAT(metrics, ::testing::ContainsRegex(
                             absl::StrCat("\nwritescope_ping_pong_steps_total[^\n]* ",
                                          micro_batches == std::string("2") ? "[1-9]" : "0\n")));
  }
}

TEST_F(WorkerTest, SigtermLetsRunningRequestsEnd) {
  Start();
  Answer answer;
  std::thread client([&] { answer = Generate(Request("The sky", 400)); });
  EXPECT_TRUE(AwaitRunning());
  worker_.process->Signal(SIGTERM);
  client.join();
  EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_EQ(answer.messages.back().usage().generated_tokens(), 400u);
  EXPECT_EQ(worker_.process->AwaitExit().value_or(-1), 0);
}

// As with a checkpoint on a file system that hangs: nothing is served yet, and nobody waits.
TEST_F(WorkerTest, SigtermEndsAStartThatWaitsForAFile) {
  const testing_support::TempDir folder;
  const std::string fifo = folder.path() + "/worker.conf";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const auto worker = ChildProcess::Start(WORKER, {"--config=" + fifo});
  ASSERT_TRUE(worker.ok()) << worker.status();
  // Opening it blocks until the worker has opened it too, and is about to read.
  const int fd = open(fifo.c_str(), O_WRONLY | O_CLOEXEC);
  (*worker)->Signal(SIGTERM);
  EXPECT_EQ((*worker)->AwaitExit(absl::Seconds(20)).value_or(-1), 0);
  close(fd);
}

TEST_F(WorkerTest, SecondSigtermDoesNotWait) {
  Start();
  Answer answer;
  std::thread client([&] { answer = Generate(Request("The sky", 30'000)); });
  EXPECT_TRUE(AwaitRunning());
  worker_.process->Signal(SIGTERM);
  absl::SleepFor(absl::Milliseconds(200));
  worker_.process->Signal(SIGTERM);
  const absl::Time start = absl::Now();
  client.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_EQ(answer.status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(worker_.process->AwaitExit().value_or(-1), 0);
}

TEST_F(WorkerTest, MoreConnectionsThanTheShellsDescriptorsDoNotDeafenIt) {
  std::vector<std::string> arguments = {"-c", "ulimit -Sn 64; exec \"$0\" \"$@\"", WORKER};
  for (std::string& flag : Flags({})) arguments.push_back(std::move(flag));
  StartAs("/bin/sh", std::move(arguments));
  const std::vector<int> silent = controller::ConnectSilently(worker_.generation, 100);
  EXPECT_TRUE(Generate(Request("x", 1), absl::Seconds(20)).status.ok());
  for (const int fd : silent) close(fd);
  EXPECT_TRUE(Generate(Request("x", 1), absl::Seconds(20)).status.ok());
}

TEST_F(WorkerTest, KilledWorkerIsUnavailable) {
  Start();
  Answer answer;
  std::thread client([&] { answer = Generate(Request("The sky", 30'000)); });
  EXPECT_TRUE(AwaitRunning());
  worker_.process->Kill();
  client.join();
  EXPECT_EQ(answer.status.error_code(), StatusCode::UNAVAILABLE);
}

TEST_F(WorkerTest, BadRequestsHaveTheirCodeAndReason) {
  Start({"--max-context=512"});
  struct Case {
    std::string reason;
    v1::GenerateRequest request;
  };
  std::vector<Case> cases;
  const auto add = [&](const std::string& reason) -> v1::GenerateRequest& {
    cases.push_back({reason, Request("The sky", 4)});
    return cases.back().request;
  };
  add("EMPTY_PROMPT").set_text("");
  add("EMPTY_PROMPT").clear_prompt();
  add("EMPTY_PROMPT").mutable_token_ids();
  add("CONTEXT_LENGTH_EXCEEDED").set_text(Prose(8000));
  add("INVALID_TOKEN_ID").mutable_token_ids()->add_ids(4096);
  add("INVALID_PARAMETER").mutable_sampling()->set_temperature(-0.5);
  add("INVALID_PARAMETER").mutable_sampling()->set_temperature(std::nanf(""));
  add("INVALID_PARAMETER").mutable_sampling()->set_top_p(0);
  add("INVALID_PARAMETER").mutable_sampling()->set_min_p(1);
  add("INVALID_PARAMETER").mutable_sampling()->set_repetition_penalty(0);
  add("INVALID_PARAMETER").mutable_sampling()->set_presence_penalty(2.5);
  add("INVALID_PARAMETER").mutable_stopping()->add_stop("");
  add("INVALID_PARAMETER").mutable_logprobs()->set_logprobs(21);
  v1::GenerateRequest& stops = add("INVALID_PARAMETER");
  for (int i = 0; i < 17; ++i) stops.mutable_stopping()->add_stop(absl::StrCat("s", i));
  for (const Case& c : cases) {
    const Answer answer = Generate(c.request);
    EXPECT_EQ(answer.status.error_code(), StatusCode::INVALID_ARGUMENT)
        << c.reason << ": " << answer.status.error_message();
    EXPECT_EQ(answer.reason(), c.reason) << answer.status.error_message();
  }
  EXPECT_TRUE(Generate(Request("The sky", 4)).status.ok());
  EXPECT_TRUE(Generate(Request("The sky", 0)).status.ok());
  EXPECT_TRUE(AllFree());
}

TEST_F(WorkerTest, AnIdCanBeUsedAgainAtOnce) {
  Start();
  for (int i = 0; i < 50; ++i) {
    v1::GenerateRequest request = Request("The sky", 2);
    request.set_request_id("again");
    const Answer answer = Generate(request);
    ASSERT_TRUE(answer.status.ok()) << i << ": " << answer.status.error_message();
  }
}

TEST_F(WorkerTest, PromptLogprobsCoverThePrompt) {
  Start({"--kv-dtype=f32"});
  v1::GenerateRequest request = Request(Prose(4000), 1);
  request.mutable_logprobs()->set_prompt_logprobs(3);
  const Answer answer = Generate(request);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  uint32_t positions = 0;
  for (const v1::GenerateResponse& message : answer.messages) {
    for (const v1::PositionLogprobs& position : message.prompt_logprobs()) {
      EXPECT_EQ(position.has_token(), positions > 0);
      if (positions > 0) {
        EXPECT_EQ(position.top_size(), 3);
        EXPECT_LE(position.token().logprob(), position.top(0).logprob());
      }
      ++positions;
    }
  }
  EXPECT_EQ(positions, answer.messages.back().usage().prompt_tokens());
}

TEST_F(WorkerTest, CancelDuringALongPromptFreesItSoon) {
  Start({"--prefill-chunk=128"});
  grpc::ClientContext context;
  SetDeadline(context);
  auto reader = generation_->Generate(&context, Request(Prose(100'000), 4));
  EXPECT_TRUE(AwaitRunning());
  context.TryCancel();
  const absl::Time cancelled = absl::Now();
  EXPECT_TRUE(AllFree());
  EXPECT_LT(absl::Now() - cancelled, absl::Seconds(1));
  v1::GenerateResponse message;
  while (reader->Read(&message)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), StatusCode::CANCELLED);
}

// A client leaves at any moment: before admission, in the queue, in the prompt, in the answer.
TEST_F(WorkerTest, FiveHundredRandomCancelsLeaveNothingBehind) {
  Start();
  const std::string prose = Prose(6000);
  std::vector<std::thread> clients;
  std::atomic<int> not_cancelled{0};
  const uint64_t seed = testing_support::TestSeed();
  for (int c = 0; c < 5; ++c) {
    clients.emplace_back([&, c] {
      std::mt19937_64 random(seed + static_cast<uint64_t>(c));
      for (int i = 0; i < 100; ++i) {
        const size_t start = random() % 3000;
        grpc::ClientContext context;
        const bool by_deadline = random() % 4 == 0;
        SetDeadline(context,
                    by_deadline ? absl::Milliseconds(1 + random() % 30) : absl::Seconds(60));
        auto reader = generation_->Generate(
            &context, Request(prose.substr(start, 200 + random() % 2000), 2000));
        v1::GenerateResponse message;
        if (!by_deadline) {
          for (uint64_t reads = random() % 8; reads > 0; --reads) reader->Read(&message);
          context.TryCancel();
        }
        while (reader->Read(&message)) {
        }
        if (reader->Finish().ok()) not_cancelled.fetch_add(1);
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_TRUE(AllFree()) << State().DebugString();
  EXPECT_LT(not_cancelled.load(), 50);
  EXPECT_EQ(State().moved_bytes_total(), 0u);
  EXPECT_TRUE(Generate(Request("The sky", 4)).status.ok());
}

}  // namespace
}  // namespace writescope::e2e
