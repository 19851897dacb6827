#include "tests/server/worker_fixture.h"

namespace writescope::server {
namespace {

using grpc::StatusCode;
using grpc::health::v1::HealthCheckResponse;

class DrainTest : public WorkerFixture {
 protected:
  // A request that is running when this returns; its thread puts the end into `result`.
  std::thread StartRequest(const std::string& id, uint32_t max_tokens, GenerateResult* result) {
    std::thread client([this, id, max_tokens, result] {
      v1::GenerateRequest request = TextRequest("x", id);
      request.mutable_stopping()->set_max_tokens(max_tokens);
      *result = Generate(request);
    });
    EXPECT_TRUE(Eventually([&] { return engine_->in_flight(id); }));
    return client;
  }
};

TEST_F(DrainTest, RunningRequestsEndWellWhileNewOnesAreRefused) {
  testing_support::FakeEngineOptions fake;
  fake.step = absl::Milliseconds(5);
  Start(fake);
  GenerateResult running;
  std::thread client = StartRequest("running", 100, &running);
  std::thread drain([&] { worker_->Drain([] { return true; }); });
  ASSERT_TRUE(Eventually([&] { return worker_->slot().phase() == Phase::kDraining; }));
  // Still listening: refusals and probes have an answer.
  const GenerateResult refused = Generate(TextRequest("y"));
  EXPECT_EQ(refused.status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(refused.reason(), "DRAINING");
  EXPECT_EQ(Health(kGenerationServiceName), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(Health(""), HealthCheckResponse::SERVING);
  client.join();
  EXPECT_TRUE(running.status.ok()) << running.status.error_message();
  EXPECT_EQ(running.messages.back().usage().generated_tokens(), 100u);
  drain.join();
  // Now the port is closed.
  EXPECT_EQ(Generate(TextRequest("z"), absl::Seconds(2)).status.error_code(),
            StatusCode::UNAVAILABLE);
}

TEST_F(DrainTest, SecondSignalEndsTheRestAtOnce) {
  Start();
  GenerateResult running;
  std::thread client = StartRequest("running", 1'000'000, &running);
  const absl::Time start = absl::Now();
  worker_->Drain([&] { return absl::Now() - start < absl::Milliseconds(200); });
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  client.join();
  EXPECT_EQ(running.status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(running.reason(), "DRAINING");
  EXPECT_GT(running.messages.size(), 5u);
}

TEST_F(DrainTest, TimeoutEndsTheRest) {
  Start({}, [](WorkerConfig& config) { config.drain_timeout = absl::Milliseconds(300); });
  GenerateResult running;
  std::thread client = StartRequest("running", 1'000'000, &running);
  const absl::Time start = absl::Now();
  worker_->Drain([] { return true; });
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(300));
  client.join();
  EXPECT_EQ(running.status.error_code(), StatusCode::UNAVAILABLE);
}

TEST_F(DrainTest, WatchersAreEndedToo) {
  Start();
  grpc::ClientContext context;
  SetDeadline(context);
  auto reader = control_->WatchSteps(&context, {});
  reader->WaitForInitialMetadata();
  worker_->Drain([] { return true; });
  v1::WatchStepsResponse message;
  while (reader->Read(&message)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), StatusCode::UNAVAILABLE);
}

TEST_F(DrainTest, TwoWorkersDoNotShareAPort) {
  Start({}, [](WorkerConfig& config) { config.metrics_listen = "127.0.0.1:0"; });
  WorkerConfig config;
  config.engine.model_dir = "x";
  config.listen = worker_->generation_address();
  config.control_listen = "127.0.0.1:0";
  config.metrics_listen = "";
  Worker second(config);
  const absl::Status status = second.Listen();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(config.listen));
  config.listen = "127.0.0.1:0";
  config.metrics_listen = worker_->metrics_address();
  Worker third(config);
  EXPECT_EQ(third.Listen().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace writescope::server
