// The controller's binary against a worker on loopback: the simulated machine's steps, in real
// time.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "controller/decision_log.h"
#include "tests/controller/http_get.h"
#include "tests/sim/simulated_worker.h"
#include "tests/support/temp_dir.h"
#include "writescope/v1/control.grpc.pb.h"

namespace writescope::controller {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// Steps of some 20 ms whose best share is near the middle.
sim::Machine Laptop() {
  sim::Machine machine;
  machine.cpu_alone = 1.5e9;
  machine.cpu_with_link = 1.4e9;
  machine.link_alone = 1.2e9;
  machine.link_with_cpu = 1.1e9;
  machine.device = 20e9;
  machine.num_layers = 4;
  machine.dense_per_layer = 0.5e-3;
  machine.dense_per_layer_and_sequence = 0;
  return machine;
}
sim::Workload Prompt() { return {40e6, 6e6, 0, 0, 2}; }

class RealTimeWorker final : public v1::WorkerControlService::Service {
 public:
  explicit RealTimeWorker(int wanted_port = 0) : start_time_(absl::Now()) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(absl::StrCat("127.0.0.1:", wanted_port),
                             grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~RealTimeWorker() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status WatchSteps(grpc::ServerContext* context, const v1::WatchStepsRequest*,
                          grpc::ServerWriter<v1::WatchStepsResponse>* writer) override {
    while (!context->IsCancelled()) {
      v1::WatchStepsResponse response;
      {
        std::lock_guard lock(mutex_);
        Fill(sim::RunStep(machine_, Prompt(), ShareNow()), response.mutable_step());
        response.mutable_step()->set_step(++steps_);
      }
      absl::SleepFor(absl::Seconds(response.step().step_seconds()));
      if (!writer->Write(response)) break;
    }
    return grpc::Status::OK;
  }
  grpc::Status GetWorkerState(grpc::ServerContext*, const v1::GetWorkerStateRequest*,
                              v1::GetWorkerStateResponse* response) override {
    std::lock_guard lock(mutex_);
    response->set_worker_id(absl::StrCat("loopback-", absl::ToUnixNanos(start_time_)));
    response->set_steps_total(steps_);
    response->set_running_requests(2);
    FillShare(response->mutable_share());
    return grpc::Status::OK;
  }
  grpc::Status GetMachineProfile(grpc::ServerContext*, const v1::GetMachineProfileRequest*,
                                 v1::GetMachineProfileResponse* response) override {
    response->mutable_profile()->set_cpu_alone(1e9);
    response->mutable_profile()->set_cpu_with_link(1e9);
    response->mutable_profile()->set_link_alone(1e9);
    response->mutable_profile()->set_link_with_cpu(1e9);
    return grpc::Status::OK;
  }
  grpc::Status SetCpuShare(grpc::ServerContext*, const v1::SetCpuShareRequest* request,
                           v1::SetCpuShareResponse* response) override {
    std::lock_guard lock(mutex_);
    const bool foreign = absl::Now() < lease_ends_ && request->controller_id() != holder_;
    if (request->generation() <= generation_ || foreign) {
      response->set_outcome(v1::SHARE_OUTCOME_STALE);
    } else {
      table_ = {};
      for (const v1::ShareBucket& bucket : request->buckets()) {
        table_.buckets.push_back({bucket.max_batch(), {}});
        for (const v1::SharePoint& point : bucket.points()) {
          table_.buckets.back().points.push_back({point.spilled_bytes(), point.cpu_share()});
        }
      }
      valid_ = valid_ && table_.Validate().ok();
      generation_ = request->generation();
      holder_ = request->controller_id();
      lease_ends_ = absl::Now() + absl::Seconds(request->valid_for().seconds());
      response->set_outcome(v1::SHARE_OUTCOME_APPLIED);
    }
    FillShare(response->mutable_in_force());
    return grpc::Status::OK;
  }

  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }
  int port() const { return port_; }
  double share() {
    std::lock_guard lock(mutex_);
    return ShareNow();
  }
  uint64_t generation() {
    std::lock_guard lock(mutex_);
    return generation_;
  }
  std::string holder() {
    std::lock_guard lock(mutex_);
    return absl::Now() < lease_ends_ ? holder_ : "";
  }
  bool valid() {
    std::lock_guard lock(mutex_);
    return valid_;
  }
  void SlowTheLink(double factor) {
    std::lock_guard lock(mutex_);
    machine_.link_alone /= factor;
    machine_.link_with_cpu /= factor;
  }
  double BestShare() {
    std::lock_guard lock(mutex_);
    return sim::FindBest(machine_, Prompt()).share;
  }

 private:
  double ShareNow() const {
    if (absl::Now() >= lease_ends_) return 0.1;
    return table_.Lookup(2, static_cast<uint64_t>(Prompt().spilled_bytes));
  }
  void FillShare(v1::ShareState* share) const {
    share->set_generation(generation_);
    const absl::Duration left = lease_ends_ - absl::Now();
    if (left > absl::ZeroDuration()) {
      share->set_controller_id(holder_);
      share->mutable_expires_in()->set_seconds(absl::ToInt64Seconds(left));
      share->mutable_expires_in()->set_nanos(1);
    }
    share->set_max_cpu_share(1);
  }
  static void Fill(const StepSample& sample, v1::StepTelemetry* step) {
    step->set_kind(v1::STEP_KIND_DECODE);
    step->set_step_seconds(sample.step_seconds);
    step->set_batch_size(sample.batch_size);
    step->set_spilled_bytes(sample.spilled_bytes);
    step->set_cpu_bytes(sample.cpu_bytes);
    step->set_link_bytes(sample.link_bytes);
    step->set_resident_bytes(sample.resident_bytes);
    step->set_cpu_busy_seconds(sample.cpu_busy_seconds);
    step->set_link_busy_seconds(sample.link_busy_seconds);
    step->set_both_busy_seconds(sample.both_busy_seconds);
    step->set_dense_seconds(sample.dense_seconds);
    step->set_device_attention_seconds(sample.device_attention_seconds);
    step->set_cpu_bytes_both_busy(sample.cpu_bytes_both_busy);
    step->set_link_bytes_both_busy(sample.link_bytes_both_busy);
    step->set_observed_cpu_share(sample.observed_cpu_share);
  }

  const absl::Time start_time_;
  std::mutex mutex_;
  sim::Machine machine_ = Laptop();
  uint64_t steps_ = 0;
  uint64_t generation_ = 0;
  std::string holder_;
  absl::Time lease_ends_ = absl::InfinitePast();
  roofline::ShareTable table_;
  bool valid_ = true;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

// The binary, until it is stopped; its first line says where its metrics are.
class Process {
 public:
  explicit Process(std::vector<std::string> args) {
    args.insert(args.begin(), WRITESCOPE_CONTROLLER_BINARY);
    args.push_back("--metrics-listen=127.0.0.1:0");
    int out[2];
    EXPECT_EQ(pipe(out), 0);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(out[1], STDOUT_FILENO);
      close(out[0]);
      close(out[1]);
      std::vector<char*> argv;
      for (std::string& arg : args) argv.push_back(arg.data());
      argv.push_back(nullptr);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(out[1]);
    char c = 0;
    std::string line;
    while (read(out[0], &c, 1) == 1 && c != '\n') line.push_back(c);
    close(out[0]);
    EXPECT_THAT(line, StartsWith("LISTENING metrics="));
    metrics_ = line.substr(line.find('=') + 1);
  }
  ~Process() { Stop(SIGKILL); }

  // The exit code, or minus the signal that ended it.
  int Stop(int signal) {
    if (pid_ <= 0) return 0;
    kill(pid_, signal);
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  std::string Metrics() const { return HttpGet(metrics_, "/metrics"); }
  std::string Health() const { return HttpGet(metrics_, "/healthz"); }

 private:
  pid_t pid_ = 0;
  std::string metrics_;
};

bool Soon(const std::function<bool()>& holds, absl::Duration limit = absl::Seconds(20)) {
  const absl::Time end = absl::Now() + limit;
  while (absl::Now() < end) {
    if (holds()) return true;
    absl::SleepFor(absl::Milliseconds(20));
  }
  return false;
}

TEST(ControllerProcessTest, ControlsAWorkerAndFollowsItsLink) {
  RealTimeWorker worker;
  testing_support::TempDir dir;
  Process controller({"--worker", worker.address(), "--interval=100ms", "--lease=3s",
                      "--controller-id=c1", "--decision-log", dir.File("log")});
  const auto near_best = [&] { return std::abs(worker.share() - worker.BestShare()) < 0.05; };
  EXPECT_TRUE(Soon(near_best)) << worker.share() << " for " << worker.BestShare();
  const double before = worker.share();
  worker.SlowTheLink(2);
  EXPECT_TRUE(Soon([&] { return near_best() && worker.share() > before + 0.05; }))
      << worker.share() << " for " << worker.BestShare();
  const double slow = worker.share();
  worker.SlowTheLink(0.25);
  EXPECT_TRUE(Soon([&] { return near_best() && worker.share() < slow - 0.05; }))
      << worker.share() << " for " << worker.BestShare();
  EXPECT_TRUE(worker.valid());
  EXPECT_EQ(worker.holder(), "c1");
  const std::string metrics = controller.Metrics();
  EXPECT_THAT(metrics, HasSubstr("writescope_controller_connected 1"));
  EXPECT_THAT(metrics, HasSubstr("writescope_controller_role{role=\"active\"} 1"));
  EXPECT_EQ(controller.Stop(SIGTERM), 0);
  EXPECT_TRUE(DecisionLog::Create(dir.File("log"), 1 << 20).ok());
  EXPECT_EQ(system(absl::StrCat(WRITESCOPE_REPLAY_BINARY, " ", dir.File("log"),
                                " --hysteresis=0.05 --max-change=0.5 > ", dir.File("table"))
                       .c_str()),
            0);
}

TEST(ControllerProcessTest, StartsAndStopsWithoutAWorker) {
  Process controller({"--worker=127.0.0.1:1"});
  EXPECT_THAT(controller.Health(), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(controller.Metrics(), HasSubstr("writescope_controller_connected 0"));
  const absl::Time start = absl::Now();
  EXPECT_EQ(controller.Stop(SIGTERM), 0);
  EXPECT_LT(absl::Now() - start, absl::Seconds(3));
}

TEST(ControllerProcessTest, KilledAndReplaced) {
  RealTimeWorker worker;
  const std::vector<std::string> args = {"--worker", worker.address(), "--interval=100ms",
                                         "--lease=2s"};
  std::vector<std::string> first_args = args, second_args = args;
  first_args.push_back("--controller-id=first");
  second_args.push_back("--controller-id=second");
  Process first(first_args);
  ASSERT_TRUE(Soon([&] { return worker.holder() == "first"; }));
  Process second(second_args);
  absl::SleepFor(absl::Seconds(3));
  EXPECT_EQ(worker.holder(), "first");
  EXPECT_THAT(second.Metrics(), HasSubstr("writescope_controller_role{role=\"standby\"} 1"));
  const uint64_t generation = worker.generation();
  EXPECT_EQ(first.Stop(SIGKILL), -SIGKILL);
  EXPECT_TRUE(Soon([&] { return worker.holder() == "second"; }, absl::Seconds(6)));
  EXPECT_GT(worker.generation(), generation);
  // The first comes back, and stands by in turn.
  Process again(first_args);
  absl::SleepFor(absl::Seconds(3));
  EXPECT_EQ(worker.holder(), "second");
  EXPECT_THAT(again.Metrics(), HasSubstr("writescope_controller_role{role=\"standby\"} 1"));
}

TEST(ControllerProcessTest, FindsARestartedWorker) {
  auto worker = std::make_unique<RealTimeWorker>();
  const int port = worker->port();
  Process controller({"--worker", worker->address(), "--interval=100ms", "--controller-id=c"});
  ASSERT_TRUE(Soon([&] { return worker->holder() == "c"; }));
  worker.reset();
  EXPECT_TRUE(Soon([&] {
    return controller.Metrics().find("writescope_controller_connected 0") != std::string::npos;
  }));
  worker = std::make_unique<RealTimeWorker>(port);
  EXPECT_TRUE(Soon([&] { return worker->holder() == "c"; }));
  EXPECT_TRUE(Soon([&] {
    return controller.Metrics().find("writescope_controller_worker_restarts_total 1") !=
           std::string::npos;
  }));
}

TEST(ControllerProcessTest, WrongFlagsExitWithTwo) {
  EXPECT_EQ(WEXITSTATUS(system(WRITESCOPE_CONTROLLER_BINARY " --pin-share=2 2>/dev/null")), 2);
  EXPECT_EQ(WEXITSTATUS(system(WRITESCOPE_CONTROLLER_BINARY " --version >/dev/null")), 0);
  EXPECT_EQ(WEXITSTATUS(system(WRITESCOPE_CONTROLLER_BINARY
                               " --metrics-listen=192.0.2.1:1 2>/dev/null >/dev/null")),
            1);
}

}  // namespace
}  // namespace writescope::controller
