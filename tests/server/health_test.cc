#include "tests/server/worker_fixture.h"

namespace writescope::server {
namespace {

using grpc::health::v1::HealthCheckResponse;
using ::testing::HasSubstr;
using ::testing::Not;

class HealthTest : public WorkerFixture {
 protected:
  // Looks at the engine each second of `span`, which begins `ahead` from now, until an error.
  absl::Status Watch(absl::Duration span, absl::Duration ahead = absl::ZeroDuration()) {
    const absl::Time begin = absl::Now() + ahead;
    for (absl::Time now = begin; now <= begin + span; now += absl::Seconds(1)) {
      if (absl::Status status = worker_->CheckEngine(now); !status.ok()) return status;
    }
    return absl::OkStatus();
  }
};

TEST_F(HealthTest, EachServiceHasItsOwnStatus) {
  ListenOnly();
  for (const bool control : {false, true}) {
    EXPECT_EQ(Health("", control), HealthCheckResponse::SERVING);
    EXPECT_EQ(Health(kGenerationServiceName, control), HealthCheckResponse::NOT_SERVING);
    EXPECT_EQ(Health("no.such.Service", control), HealthCheckResponse::SERVICE_UNKNOWN);
  }
  EXPECT_EQ(Health(kControlServiceName, true), HealthCheckResponse::SERVING);
  Load();
  EXPECT_EQ(Health(kGenerationServiceName), HealthCheckResponse::SERVING);
  EXPECT_EQ(Health(kGenerationServiceName, true), HealthCheckResponse::SERVING);
}

TEST_F(HealthTest, WatchPushesChanges) {
  ListenOnly();
  auto stub = grpc::health::v1::Health::NewStub(channel_);
  grpc::ClientContext context;
  SetDeadline(context);
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(kGenerationServiceName);
  auto reader = stub->Watch(&context, request);
  HealthCheckResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  Load();
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVING);
  std::thread drain([&] { worker_->Drain([] { return true; }); });
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  // An open Watch does not hold the shutdown up.
  drain.join();
  while (reader->Read(&response)) {
  }
  EXPECT_FALSE(reader->Finish().ok());
}

TEST_F(HealthTest, ReflectionListsTheServicesOfItsPort) {
  Start();
  // ServerReflectionRequest { list_services: "" }.
  const std::string list("\x3a\x00", 2);
  const std::string method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
  const RawResult generation = RawCall(channel_, method, list);
  ASSERT_TRUE(generation.status.ok()) << generation.status.error_message();
  ASSERT_EQ(generation.messages.size(), 1u);
  EXPECT_THAT(generation.messages[0], HasSubstr(kGenerationServiceName));
  EXPECT_THAT(generation.messages[0], HasSubstr("grpc.health.v1.Health"));
  EXPECT_THAT(generation.messages[0], Not(HasSubstr(kControlServiceName)));
  const RawResult control = RawCall(control_channel_, method, list);
  ASSERT_EQ(control.messages.size(), 1u);
  EXPECT_THAT(control.messages[0], HasSubstr(kControlServiceName));
  EXPECT_THAT(control.messages[0], Not(HasSubstr(kGenerationServiceName)));
  // ServerReflectionRequest { file_containing_symbol: ... } gives the descriptor.
  std::string describe("\x22");
  describe += static_cast<char>(sizeof(kGenerationServiceName) - 1);
  describe += kGenerationServiceName;
  const RawResult file = RawCall(channel_, method, describe);
  ASSERT_EQ(file.messages.size(), 1u);
  EXPECT_THAT(file.messages[0], HasSubstr("writescope/v1/generation.proto"));
}

TEST_F(HealthTest, SilentEngineIsNotServingUntilItGoesOn) {
  Start({}, [](WorkerConfig& config) { config.stall_limit = absl::Milliseconds(1000); });
  engine_->Freeze(true);
  absl::SleepFor(absl::Milliseconds(10));
  // Silence without work is fine.
  EXPECT_TRUE(Watch(absl::Minutes(10)).ok());
  EXPECT_EQ(Health(kGenerationServiceName), HealthCheckResponse::SERVING);
  std::thread client([&] { EXPECT_TRUE(Generate(TextRequest("x", "waits")).status.ok()); });
  ASSERT_TRUE(Eventually([&] { return engine_->in_flight("waits"); }));
  EXPECT_TRUE(Watch(absl::Seconds(3)).ok());
  EXPECT_EQ(Health(kGenerationServiceName), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(Health(""), HealthCheckResponse::SERVING);
  engine_->Freeze(false);
  client.join();
  EXPECT_TRUE(worker_->CheckEngine(absl::Now()).ok());
  EXPECT_EQ(Health(kGenerationServiceName), HealthCheckResponse::SERVING);
}

TEST_F(HealthTest, EngineSilentForTooLongIsGivenUp) {
  Start({}, [](WorkerConfig& config) { config.stall_limit = absl::Seconds(1); });
  engine_->Freeze(true);
  std::thread client([&] { Generate(TextRequest("x", "waits")); });
  ASSERT_TRUE(Eventually([&] { return engine_->in_flight("waits"); }));
  EXPECT_EQ(Watch(absl::Seconds(60)).code(), absl::StatusCode::kDeadlineExceeded);
  engine_->Freeze(false);
  client.join();
}

TEST_F(HealthTest, AProcessThatWasStoppedIsNotGivenUp) {
  Start({}, [](WorkerConfig& config) { config.stall_limit = absl::Seconds(2); });
  engine_->Freeze(true);
  std::thread client([&] { Generate(TextRequest("x", "waits")); });
  ASSERT_TRUE(Eventually([&] { return engine_->in_flight("waits"); }));
  EXPECT_TRUE(Watch(absl::Seconds(1)).ok());
  // Nobody looked for an hour, and the engine has had a second since.
  EXPECT_TRUE(Watch(absl::Seconds(1), absl::Hours(1)).ok());
  EXPECT_EQ(Health(kGenerationServiceName), HealthCheckResponse::SERVING);
  // An engine that goes on being silent is noticed all the same.
  EXPECT_EQ(Watch(absl::Seconds(60), absl::Hours(1)).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Health(kGenerationServiceName), HealthCheckResponse::NOT_SERVING);
  engine_->Freeze(false);
  client.join();
}

TEST_F(HealthTest, FailedEngineIsReportedAndRefusesWork) {
  Start();
  EXPECT_TRUE(worker_->CheckEngine(absl::Now()).ok());
  engine_->Fail(absl::InternalError("the device is gone"));
  const absl::Status status = worker_->CheckEngine(absl::Now());
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the device is gone"));
  EXPECT_EQ(Health(kGenerationServiceName), HealthCheckResponse::NOT_SERVING);
  const GenerateResult result = Generate(TextRequest("x"));
  EXPECT_EQ(result.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(result.reason(), "ENGINE_FAILED");
}

}  // namespace
}  // namespace writescope::server
