// The gRPC client against a scripted service on loopback.
#include "controller/worker_client.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "writescope/v1/control.grpc.pb.h"
#include "writescope/v1/generation.grpc.pb.h"

namespace writescope::controller {
namespace {

class FakeService final : public v1::WorkerControlService::Service {
 public:
  grpc::Status WatchSteps(grpc::ServerContext* context, const v1::WatchStepsRequest*,
                          grpc::ServerWriter<v1::WatchStepsResponse>* writer) override {
    ++streams;
    std::unique_lock lock(mutex_);
    size_t sent = 0;
    while (!closing_ && !context->IsCancelled()) {
      for (; sent < steps_.size(); ++sent) {
        if (!writer->Write(steps_[sent])) return grpc::Status::OK;
      }
      changed_.wait_for(lock, std::chrono::milliseconds(10));
    }
    ++streams_ended;
    return {grpc::StatusCode::UNAVAILABLE, "the worker is shutting down"};
  }
  grpc::Status SetCpuShare(grpc::ServerContext*, const v1::SetCpuShareRequest* request,
                           v1::SetCpuShareResponse* response) override {
    last_update = *request;
    if (on_set != nullptr) return on_set(response);
    return grpc::Status::OK;
  }
  grpc::Status GetWorkerState(grpc::ServerContext*, const v1::GetWorkerStateRequest*,
                              v1::GetWorkerStateResponse* response) override {
    if (hang) absl::SleepFor(absl::Seconds(2));
    *response = state;
    return grpc::Status::OK;
  }
  grpc::Status GetMachineProfile(grpc::ServerContext*, const v1::GetMachineProfileRequest*,
                                 v1::GetMachineProfileResponse* response) override {
    *response->mutable_profile() = profile;
    return grpc::Status::OK;
  }

  void Send(uint64_t step, uint64_t dropped = 0) {
    std::lock_guard lock(mutex_);
    v1::WatchStepsResponse response;
    response.mutable_step()->set_step(step);
    response.mutable_step()->set_kind(v1::STEP_KIND_DECODE);
    response.mutable_step()->set_cpu_bytes(10 * step);
    response.set_dropped(dropped);
    steps_.push_back(response);
    changed_.notify_all();
  }
  void CloseStreams() {
    std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }

  std::atomic<int> streams{0};
  std::atomic<int> streams_ended{0};
  std::atomic<bool> hang{false};
  std::function<grpc::Status(v1::SetCpuShareResponse*)> on_set;
  v1::SetCpuShareRequest last_update;
  v1::GetWorkerStateResponse state;
  v1::MachineProfile profile;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<v1::WatchStepsResponse> steps_;
  bool closing_ = false;
};

struct Server {
  explicit Server(int wanted_port = 0) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(absl::StrCat("127.0.0.1:", wanted_port),
                             grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service);
    server = builder.BuildAndStart();
  }
  ~Server() {
    service.CloseStreams();
    if (server != nullptr) server->Shutdown(std::chrono::system_clock::now());
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", port); }

  FakeService service;
  int port = 0;
  std::unique_ptr<grpc::Server> server;
};

GrpcWorkerClientOptions Options(const std::string& address) {
  GrpcWorkerClientOptions options;
  options.address = address;
  options.call_deadline = absl::Milliseconds(500);
  options.min_backoff = absl::Milliseconds(20);
  options.max_backoff = absl::Milliseconds(200);
  return options;
}

// Gathers until the condition holds; gives up after ten seconds.
StepBatch WatchUntil(GrpcWorkerClient& client, const std::function<bool(const StepBatch&)>& done) {
  const absl::Time limit = absl::Now() + absl::Seconds(10);
  StepBatch all;
  while (absl::Now() < limit) {
    StepBatch batch = client.WatchSteps(absl::Milliseconds(20));
    if (batch.stream != all.stream) all.steps.clear();
    all.stream = batch.stream;
    all.connected = batch.connected;
    all.dropped += batch.dropped;
    all.steps.insert(all.steps.end(), batch.steps.begin(), batch.steps.end());
    if (done(all)) return all;
  }
  ADD_FAILURE() << "not within ten seconds";
  return all;
}

int Count(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(WorkerClientTest, WhyTheStreamOfStepsEndedIsLogged) {
  ::testing::internal::CaptureStderr();
  {
    Server server;
    server.service.Send(1);
    GrpcWorkerClient client(Options(server.address()));
    WatchUntil(client, [](const StepBatch& all) { return !all.steps.empty(); });
    server.service.CloseStreams();
    WatchUntil(client, [&](const StepBatch&) { return server.service.streams > 1; });
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, ::testing::HasSubstr("code=14 message=\"the worker is shutting down\""));
}

TEST(WorkerClientTest, StepsArriveInOrder) {
  Server server;
  GrpcWorkerClient client(Options(server.address()));
  for (uint64_t i = 1; i <= 100; ++i) server.service.Send(i, i == 50 ? 3 : 0);
  const StepBatch batch =
      WatchUntil(client, [](const StepBatch& b) { return b.steps.size() == 100; });
  EXPECT_TRUE(batch.connected);
  EXPECT_EQ(batch.stream, 1u);
  EXPECT_EQ(batch.dropped, 3u) << "what the worker dropped is passed on";
  for (size_t i = 0; i < batch.steps.size(); ++i) {
    EXPECT_EQ(batch.steps[i].step, i + 1);
    EXPECT_EQ(batch.steps[i].cpu_bytes, 10 * (i + 1));
    EXPECT_EQ(batch.steps[i].kind, StepKind::kDecode);
  }
}

TEST(WorkerClientTest, ASlowReaderLosesTheOldest) {
  Server server;
  GrpcWorkerClientOptions options = Options(server.address());
  options.max_waiting_steps = 10;
  GrpcWorkerClient client(options);
  for (uint64_t i = 1; i <= 50; ++i) server.service.Send(i);
  absl::SleepFor(absl::Milliseconds(500));
  const StepBatch batch =
      WatchUntil(client, [](const StepBatch& b) { return b.dropped + b.steps.size() == 50; });
  EXPECT_LE(batch.steps.size(), 20u);
  EXPECT_EQ(batch.steps.back().step, 50u);
}

TEST(WorkerClientTest, ConvertsStateAndProfile) {
  Server server;
  v1::GetWorkerStateResponse& state = server.service.state;
  state.set_worker_id("w7");
  state.mutable_start_time()->set_seconds(1700000000);
  state.set_cut("meet");
  state.set_running_requests(3);
  state.set_waiting_requests(2);
  state.set_steps_total(99);
  for (const auto& [region, bytes] :
       {std::pair{v1::REGION_DEVICE, 1}, {v1::REGION_SWING, 20}, {v1::REGION_HOST, 300}}) {
    v1::RegionState* proto = state.add_regions();
    proto->set_region(region);
    proto->set_capacity_bytes(static_cast<uint64_t>(bytes));
  }
  v1::ShareState* share = state.mutable_share();
  share->set_generation(12);
  share->set_controller_id("other");
  share->mutable_expires_in()->set_seconds(4);
  share->mutable_expires_in()->set_nanos(500000000);
  share->set_min_cpu_share(0.25);
  share->set_max_cpu_share(0.75);
  v1::ShareBucket* bucket = share->add_buckets();
  bucket->set_max_batch(8);
  bucket->add_points()->set_spilled_bytes(1000);
  bucket->mutable_points(0)->set_cpu_share(0.5);
  server.service.profile.set_cpu_alone(115e9);
  server.service.profile.set_link_with_cpu(42e9);
  server.service.profile.mutable_handoff_per_layer()->set_nanos(8000);
  server.service.profile.set_measured(true);
  server.service.profile.set_num_layers(48);

  GrpcWorkerClient client(Options(server.address()));
  const auto got = client.GetWorkerState();
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->worker_id, "w7");
  EXPECT_EQ(got->start_time, absl::FromUnixSeconds(1700000000));
  EXPECT_TRUE(got->meet);
  EXPECT_EQ(got->running_requests, 3u);
  EXPECT_EQ(got->waiting_requests, 2u);
  EXPECT_EQ(got->steps_total, 99u);
  EXPECT_EQ(got->host_capacity_bytes, 320u);
  EXPECT_EQ(got->share.generation, 12u);
  EXPECT_EQ(got->share.controller_id, "other");
  EXPECT_EQ(got->share.expires_in, absl::Milliseconds(4500));
  EXPECT_EQ(got->share.allowed.min_share, 0.25);
  EXPECT_EQ(got->share.allowed.max_share, 0.75);
  EXPECT_EQ(got->share.table.Lookup(1, 5), 0.5);
  const auto profile = client.GetMachineProfile();
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ(profile->rates.cpu_alone, 115e9);
  EXPECT_EQ(profile->rates.link_with_cpu, 42e9);
  EXPECT_DOUBLE_EQ(profile->handoff_per_layer_seconds, 8e-6);
  EXPECT_TRUE(profile->measured);
  EXPECT_EQ(profile->num_layers, 48);
}

TEST(WorkerClientTest, SendsUpdatesAndReadsOutcomes) {
  Server server;
  v1::ShareOutcome outcome = v1::SHARE_OUTCOME_APPLIED;
  server.service.on_set = [&](v1::SetCpuShareResponse* response) {
    response->set_outcome(outcome);
    response->mutable_in_force()->set_generation(5);
    return grpc::Status::OK;
  };
  GrpcWorkerClient client(Options(server.address()));
  ShareUpdate update;
  update.controller_id = "me";
  update.generation = 5;
  update.table = {{{8, {{1000, 0.25}, {2000, 0.5}}}}};
  update.valid_for = absl::Milliseconds(15250);
  update.reason = "why";
  auto reply = client.SetCpuShare(update);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->outcome, ShareOutcome::kApplied);
  EXPECT_EQ(reply->in_force.generation, 5u);
  const v1::SetCpuShareRequest& sent = server.service.last_update;
  EXPECT_EQ(sent.controller_id(), "me");
  EXPECT_EQ(sent.generation(), 5u);
  EXPECT_EQ(sent.valid_for().seconds(), 15);
  EXPECT_EQ(sent.valid_for().nanos(), 250000000);
  EXPECT_EQ(sent.reason(), "why");
  ASSERT_EQ(sent.buckets_size(), 1);
  EXPECT_EQ(sent.buckets(0).max_batch(), 8u);
  EXPECT_EQ(sent.buckets(0).points(1).spilled_bytes(), 2000u);
  EXPECT_EQ(sent.buckets(0).points(1).cpu_share(), 0.5);

  outcome = v1::SHARE_OUTCOME_CLAMPED;
  EXPECT_EQ(client.SetCpuShare(update)->outcome, ShareOutcome::kClamped);
  outcome = v1::SHARE_OUTCOME_STALE;
  EXPECT_EQ(client.SetCpuShare(update)->outcome, ShareOutcome::kStale);
  outcome = v1::SHARE_OUTCOME_UNSPECIFIED;
  EXPECT_EQ(client.SetCpuShare(update).status().code(), absl::StatusCode::kInternal);
  server.service.on_set = [](v1::SetCpuShareResponse*) {
    return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "share nan");
  };
  const absl::Status refused = client.SetCpuShare(update).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused.message(), "SetCpuShare: share nan");
}

TEST(WorkerClientTest, SaysThatNoWorkerAnswers) {
  GrpcWorkerClientOptions options = Options("127.0.0.1:1");
  options.warn_after = absl::Milliseconds(150);
  ::testing::internal::CaptureStderr();
  {
    const GrpcWorkerClient client(options);
    absl::SleepFor(absl::Seconds(2));
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(Count(log, "no worker answers address=127.0.0.1:1 error="), 1) << log;
  EXPECT_THAT(log, ::testing::HasSubstr("onnection refused"));
}

// Another service, such as the worker's port for clients.
TEST(WorkerClientTest, ARefusalIsLoggedOnceInAWhile) {
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  class Other final : public v1::GenerationService::Service {
  } other;
  builder.RegisterService(&other);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  const std::string line = "what answers has no steps to watch";
  GrpcWorkerClientOptions options = Options(absl::StrCat("127.0.0.1:", port));
  for (const bool often : {false, true}) {
    if (often) options.between_warnings = absl::Milliseconds(300);
    ::testing::internal::CaptureStderr();
    uint64_t streams = 0;
    const absl::Time start = absl::Now();
    {
      GrpcWorkerClient client(options);
      // 20, 40, 80, 160, 200, ... ms lie between them.
      streams = WatchUntil(client, [](const StepBatch& all) { return all.stream >= 8; }).stream;
    }
    const absl::Duration took = absl::Now() - start;
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_GE(streams, 8u);
    if (often) {
      EXPECT_GE(Count(log, line), 2) << log;
      EXPECT_LE(Count(log, line), 1 + took / options.between_warnings) << log;
    } else {
      EXPECT_EQ(Count(log, line), 1) << log;
    }
  }
}

TEST(WorkerClientTest, StreamsThatEndInTheSameWayAreLoggedOnce) {
  ::testing::internal::CaptureStderr();
  {
    Server server;
    server.service.CloseStreams();
    GrpcWorkerClient client(Options(server.address()));
    WatchUntil(client, [](const StepBatch& all) { return all.stream >= 5; });
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(Count(log, "the worker is shutting down"), 1) << log;
}

TEST(WorkerClientTest, StartsWithoutAWorkerAndConnectsLater) {
  int port = 0;
  { port = Server().port; }
  GrpcWorkerClient client(Options(absl::StrCat("127.0.0.1:", port)));
  const absl::Time start = absl::Now();
  StepBatch batch = client.WatchSteps(absl::Milliseconds(100));
  EXPECT_FALSE(batch.connected);
  EXPECT_EQ(batch.stream, 0u);
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(90)) << "it must not spin";
  EXPECT_EQ(client.GetWorkerState().status().code(), absl::StatusCode::kUnavailable);
  Server server(port);
  ASSERT_NE(server.server, nullptr);
  server.service.Send(1);
  batch = WatchUntil(client, [](const StepBatch& b) { return !b.steps.empty(); });
  EXPECT_TRUE(batch.connected);
  EXPECT_TRUE(client.GetWorkerState().ok());
}

TEST(WorkerClientTest, ReconnectsAfterARestart) {
  auto server = std::make_unique<Server>();
  const int port = server->port;
  GrpcWorkerClient client(Options(server->address()));
  server->service.Send(41);
  WatchUntil(client, [](const StepBatch& b) { return !b.steps.empty(); });
  server.reset();
  WatchUntil(client, [](const StepBatch& b) { return !b.connected; });
  server = std::make_unique<Server>(port);
  ASSERT_NE(server->server, nullptr);
  server->service.Send(1);
  const StepBatch batch =
      WatchUntil(client, [](const StepBatch& b) { return b.connected && !b.steps.empty(); });
  EXPECT_EQ(batch.stream, 2u);
  EXPECT_EQ(batch.steps.front().step, 1u);
}

TEST(WorkerClientTest, ACallToAHungWorkerEnds) {
  Server server;
  server.service.hang = true;
  GrpcWorkerClient client(Options(server.address()));
  const absl::Time start = absl::Now();
  EXPECT_EQ(client.GetWorkerState().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(absl::Now() - start, absl::Milliseconds(1500));
}

TEST(WorkerClientTest, StopEndsASilentStream) {
  Server server;
  absl::Time stopped_at;
  {
    GrpcWorkerClient client(Options(server.address()));
    WatchUntil(client, [](const StepBatch& b) { return b.connected; });
    std::thread stopper([&] {
      absl::SleepFor(absl::Milliseconds(50));
      stopped_at = absl::Now();
      client.Stop();
    });
    client.WatchSteps(absl::Seconds(30));
    stopper.join();
  }
  EXPECT_LT(absl::Now() - stopped_at, absl::Seconds(2));
  for (int i = 0; i < 200 && server.service.streams_ended == 0; ++i) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(server.service.streams_ended, 1) << "the worker saw the end";
}

TEST(WorkerClientTest, AStreamThatIsRefusedIsTriedWithBackoff) {
  Server server;
  server.service.CloseStreams();  // Each stream ends at once.
  GrpcWorkerClient client(Options(server.address()));
  absl::SleepFor(absl::Seconds(1));
  // 20, 40, 80, 160, 200, 200, ... ms: about eight in a second, not thousands.
  EXPECT_GE(server.service.streams, 3);
  EXPECT_LE(server.service.streams, 12);
}

}  // namespace
}  // namespace writescope::controller
