#include <cmath>
#include <string>

#include "tests/server/worker_fixture.h"

namespace writescope::server {
namespace {

using grpc::StatusCode;

v1::SetCpuShareRequest Table(uint64_t generation, double share,
                             const std::string& controller = "c1") {
  v1::SetCpuShareRequest request;
  request.set_controller_id(controller);
  request.set_generation(generation);
  request.mutable_valid_for()->set_seconds(30);
  v1::ShareBucket* bucket = request.add_buckets();
  bucket->set_max_batch(8);
  v1::SharePoint* point = bucket->add_points();
  point->set_spilled_bytes(1 << 20);
  point->set_cpu_share(share);
  return request;
}

void FillTable(uint32_t buckets, uint64_t points, v1::SetCpuShareRequest& request) {
  request.clear_buckets();
  for (uint32_t b = 1; b <= buckets; ++b) {
    v1::ShareBucket* const bucket = request.add_buckets();
    bucket->set_max_batch(b);
    for (uint64_t p = 1; p <= points; ++p) bucket->add_points()->set_spilled_bytes(p);
  }
}

class ControlServiceTest : public WorkerFixture {
 protected:
  grpc::Status Set(const v1::SetCpuShareRequest& request, v1::SetCpuShareResponse* response) {
    grpc::ClientContext context;
    SetDeadline(context);
    return control_->SetCpuShare(&context, request, response);
  }
};

TEST_F(ControlServiceTest, OutcomesComeInOkReplies) {
  Start({}, [](WorkerConfig& config) {
    config.engine.min_cpu_share = 0.3;
    config.engine.max_cpu_share = 0.7;
  });
  v1::SetCpuShareResponse response;
  ASSERT_TRUE(Set(Table(5, 0.5), &response).ok());
  EXPECT_EQ(response.outcome(), v1::SHARE_OUTCOME_APPLIED);
  EXPECT_EQ(response.in_force().generation(), 5u);
  EXPECT_EQ(response.in_force().controller_id(), "c1");
  EXPECT_EQ(response.in_force().buckets(0).points(0).cpu_share(), 0.5);
  EXPECT_GT(response.in_force().expires_in().seconds(), 20);
  EXPECT_TRUE(response.in_force().has_since_update());

  ASSERT_TRUE(Set(Table(6, 0.9), &response).ok());
  EXPECT_EQ(response.outcome(), v1::SHARE_OUTCOME_CLAMPED);
  EXPECT_EQ(response.in_force().buckets(0).points(0).cpu_share(), 0.7);
  EXPECT_EQ(response.in_force().min_cpu_share(), 0.3);

  ASSERT_TRUE(Set(Table(6, 0.4), &response).ok());
  EXPECT_EQ(response.outcome(), v1::SHARE_OUTCOME_STALE);
  EXPECT_EQ(response.in_force().generation(), 6u);
  EXPECT_EQ(response.in_force().buckets(0).points(0).cpu_share(), 0.7);

  ASSERT_TRUE(Set(Table(7, 0.4, "c2"), &response).ok());
  EXPECT_EQ(response.outcome(), v1::SHARE_OUTCOME_STALE);
  EXPECT_EQ(response.in_force().controller_id(), "c1");
}

TEST_F(ControlServiceTest, BadTablesAreInvalidArguments) {
  Start();
  struct Case {
    std::string what;
    std::function<void(v1::SetCpuShareRequest&)> edit;
  };
  const auto share = [](double value) {
    return [value](v1::SetCpuShareRequest& r) {
      r.mutable_buckets(0)->mutable_points(0)->set_cpu_share(value);
    };
  };
  for (const Case& c :
       {Case{"nan", share(std::nan(""))}, Case{"negative", share(-0.1)}, Case{"2", share(2)},
        Case{"infinite", share(INFINITY)}, Case{"no table", [](auto& r) { r.clear_buckets(); }},
        Case{"no points", [](auto& r) { r.mutable_buckets(0)->clear_points(); }},
        Case{"no lease", [](auto& r) { r.clear_valid_for(); }},
        Case{"negative lease", [](auto& r) { r.mutable_valid_for()->set_seconds(-1); }},
        Case{"odd lease", [](auto& r) { r.mutable_valid_for()->set_nanos(-5); }},
        Case{"generation 0", [](auto& r) { r.set_generation(0); }},
        Case{"generation 2^63", [](auto& r) { r.set_generation(uint64_t{1} << 63); }},
        Case{"nobody", [](auto& r) { r.clear_controller_id(); }},
        Case{"long id", [](auto& r) { r.set_controller_id(std::string(257, 'x')); }},
        Case{"long reason", [](auto& r) { r.set_reason(std::string(257, 'x')); }},
        Case{"65 buckets", [](auto& r) { FillTable(65, 1, r); }},
        Case{"257 points", [](auto& r) { FillTable(1, 257, r); }},
        Case{"batch 0", [](auto& r) { r.mutable_buckets(0)->set_max_batch(0); }},
        Case{"zero bytes",
             [](auto& r) { r.mutable_buckets(0)->mutable_points(0)->set_spilled_bytes(0); }}}) {
    v1::SetCpuShareRequest request = Table(9, 0.5);
    c.edit(request);
    v1::SetCpuShareResponse response;
    const grpc::Status status = Set(request, &response);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << c.what;
    EXPECT_EQ(DescribeError(status).reason, "INVALID_PARAMETER") << c.what;
  }
  EXPECT_THAT(
      MetricsText(),
      ::testing::HasSubstr("writescope_share_updates_total{model=\"fake\",result=\"invalid\"} 18"));
  EXPECT_EQ(engine_->share().generation, 0);
  v1::SetCpuShareRequest largest = Table(uint64_t{1} << 61, 0.5, std::string(256, 'x'));
  FillTable(64, 256, largest);
  largest.set_reason(std::string(256, 'x'));
  largest.mutable_valid_for()->set_seconds(24 * 3600);
  v1::SetCpuShareResponse response;
  const grpc::Status status = Set(largest, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.outcome(), v1::SHARE_OUTCOME_APPLIED);
}

TEST_F(ControlServiceTest, TheSameRefusalIsLoggedOnce) {
  Start();
  ::testing::internal::CaptureStderr();
  for (const double share : {2, 2, 2, 3, 3, 2}) {
    v1::SetCpuShareResponse response;
    EXPECT_EQ(Set(Table(9, share), &response).error_code(), StatusCode::INVALID_ARGUMENT);
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  int lines = 0;
  for (size_t at = log.find("share table refused"); at != std::string::npos;
       at = log.find("share table refused", at + 1)) {
    ++lines;
  }
  EXPECT_EQ(lines, 3) << log;
}

TEST_F(ControlServiceTest, WatchersSeeTheSteps) {
  Start();
  grpc::ClientContext context;
  SetDeadline(context);
  auto reader = control_->WatchSteps(&context, {});
  reader->WaitForInitialMetadata();
  v1::SetCpuShareResponse response;
  ASSERT_TRUE(Set(Table(3, 0.25), &response).ok());
  ASSERT_TRUE(Generate(TextRequest("x")).status.ok());
  v1::WatchStepsResponse message;
  ASSERT_TRUE(reader->Read(&message));
  EXPECT_EQ(message.step().step(), 1u);
  EXPECT_EQ(message.step().kind(), v1::STEP_KIND_DECODE);
  EXPECT_EQ(message.step().spilled_bytes(), 1000u);
  EXPECT_EQ(message.step().cpu_bytes(), 250u);
  EXPECT_EQ(message.step().share_generation(), 3u);
  EXPECT_EQ(message.dropped(), 0u);
  EXPECT_LT(absl::AbsDuration(absl::Now() - absl::UnixEpoch() -
                              absl::Seconds(message.step().end_time().seconds())),
            absl::Seconds(20));
  ASSERT_TRUE(reader->Read(&message));
  EXPECT_EQ(message.step().step(), 2u);
  context.TryCancel();
  while (reader->Read(&message)) {
  }
  reader->Finish();
}

TEST_F(ControlServiceTest, SlowWatcherLosesTheOldestAndIsToldHowMany) {
  EngineSlot slot;
  WorkerMetrics metrics({.model = "m", .device = "cpu", .version = "0", .kv_dtype = "bf16"}, &slot);
  StreamPump pump;
  ControlServiceImpl service(&slot, &metrics, &pump,
                             {.worker_id = "w", .version = "0", .watch_buffer_steps = 8});
  GrpcServerOptions options;
  options.listen = "127.0.0.1:0";
  auto server = GrpcServer::Create(options, {&service});
  ASSERT_TRUE(server.ok()) << server.status();
  auto stub = v1::WorkerControlService::NewStub(Connect((*server)->address()));
  grpc::ClientContext context;
  SetDeadline(context);
  auto reader = stub->WatchSteps(&context, {});
  reader->WaitForInitialMetadata();
  constexpr uint64_t kSteps = 200'000;
  runtime::StepStats stats;
  for (uint64_t i = 1; i <= kSteps; ++i) {
    stats.step = static_cast<int64_t>(i);
    service.PublishStep(stats);
  }
  std::thread closer([&] {
    absl::SleepFor(absl::Milliseconds(200));
    service.CloseWatchers();
  });
  uint64_t last = 0;
  uint64_t seen = 0;
  uint64_t dropped = 0;
  v1::WatchStepsResponse message;
  while (reader->Read(&message)) {
    EXPECT_EQ(message.step().step(), last + 1 + message.dropped());
    last = message.step().step();
    ++seen;
    dropped += message.dropped();
  }
  closer.join();
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_GT(dropped, 0u);
  EXPECT_EQ(last, kSteps);  // The newest are kept.
  EXPECT_EQ(seen + dropped, kSteps);
  (*server)->Shutdown(absl::ZeroDuration());
}

TEST_F(ControlServiceTest, StateTellsRegionsShareAndLastStep) {
  ListenOnly();
  grpc::ClientContext loading_context;
  SetDeadline(loading_context);
  v1::GetWorkerStateResponse state;
  ASSERT_TRUE(control_->GetWorkerState(&loading_context, {}, &state).ok());
  EXPECT_EQ(state.phase(), "starting");
  Load();
  ASSERT_TRUE(Generate(TextRequest("x")).status.ok());
  grpc::ClientContext context;
  SetDeadline(context);
  ASSERT_TRUE(control_->GetWorkerState(&context, {}, &state).ok());
  EXPECT_EQ(state.phase(), "serving");
  EXPECT_EQ(state.model(), "fake");
  EXPECT_FALSE(state.worker_id().empty());
  ASSERT_EQ(state.regions_size(), 4);
  EXPECT_EQ(state.regions(2).region(), v1::REGION_SWING);
  EXPECT_EQ(state.regions(2).capacity_bytes(), 64u << 20);
  EXPECT_GT(state.steps_total(), 0u);
  EXPECT_GT(state.last_decode_step().step(), 0u);
  EXPECT_EQ(state.cut(), "meet");
  EXPECT_EQ(state.share().max_cpu_share(), 1);
  EXPECT_FALSE(state.share().has_since_update());
}

TEST_F(ControlServiceTest, MachineProfileAndLinkPace) {
  Start({}, [](WorkerConfig& config) { config.engine.link_bytes_per_s = 5e8; });
  grpc::ClientContext context;
  SetDeadline(context);
  v1::GetMachineProfileResponse profile;
  ASSERT_TRUE(control_->GetMachineProfile(&context, {}, &profile).ok());
  EXPECT_EQ(profile.profile().cpu_with_link(), 3e9);
  EXPECT_EQ(profile.profile().handoff_per_layer().nanos(), 8000);
  EXPECT_EQ(profile.profile().num_layers(), 2u);
  v1::SetLinkPaceRequest request;
  request.set_bytes_per_second(1e9);
  v1::SetLinkPaceResponse reply;
  grpc::ClientContext pace_context;
  SetDeadline(pace_context);
  ASSERT_TRUE(control_->SetLinkPace(&pace_context, request, &reply).ok());
  EXPECT_EQ(reply.previous_bytes_per_second(), 5e8);
  EXPECT_EQ(engine_->state().link_pace_bytes_per_s, 1e9);
  for (const double bad : {-1.0, 1e-300, 999e3, std::nan(""), double{INFINITY}}) {
    request.set_bytes_per_second(bad);
    grpc::ClientContext bad_context;
    SetDeadline(bad_context);
    EXPECT_EQ(control_->SetLinkPace(&bad_context, request, &reply).error_code(),
              StatusCode::INVALID_ARGUMENT)
        << bad;
  }
}

TEST_F(ControlServiceTest, RealLinkHasNoPace) {
  testing_support::FakeEngineOptions fake;
  fake.link_simulated = false;
  Start(fake);
  grpc::ClientContext context;
  SetDeadline(context);
  v1::SetLinkPaceResponse reply;
  EXPECT_EQ(control_->SetLinkPace(&context, {}, &reply).error_code(),
            StatusCode::FAILED_PRECONDITION);
}

// R10: the services do not answer on each other's ports.
TEST_F(ControlServiceTest, ControlIsNotOnTheClientsPort) {
  Start();
  auto wrong = v1::WorkerControlService::NewStub(channel_);
  grpc::ClientContext context;
  SetDeadline(context);
  v1::GetWorkerStateResponse state;
  EXPECT_EQ(wrong->GetWorkerState(&context, {}, &state).error_code(), StatusCode::UNIMPLEMENTED);
  auto also_wrong = v1::GenerationService::NewStub(control_channel_);
  grpc::ClientContext info_context;
  SetDeadline(info_context);
  v1::GetModelInfoResponse info;
  EXPECT_EQ(also_wrong->GetModelInfo(&info_context, {}, &info).error_code(),
            StatusCode::UNIMPLEMENTED);
}

TEST_F(ControlServiceTest, ControlOverAUnixSocket) {
  const std::string path = ::testing::TempDir() + "/ws_control.sock";
  Start({}, [&](WorkerConfig& config) { config.control_listen = "unix:" + path; });
  EXPECT_EQ(worker_->control_address(), "unix:" + path);
  grpc::ClientContext context;
  SetDeadline(context);
  v1::GetWorkerStateResponse state;
  EXPECT_TRUE(control_->GetWorkerState(&context, {}, &state).ok());
}

}  // namespace
}  // namespace writescope::server
