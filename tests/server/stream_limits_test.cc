// Clients that read slowly, not at all, send nothing, or ping a silent stream.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "grpcpp/generic/generic_stub.h"
#include "server/grpc_server.h"
#include "tests/server/worker_fixture.h"

namespace writescope::server {
namespace {

using grpc::StatusCode;

class StreamLimitsTest : public WorkerFixture {
 protected:
  void StartWithLongMessages(absl::Duration stall_limit) {
    testing_support::FakeEngineOptions fake;
    fake.step = absl::Microseconds(200);
    fake.words = {std::string(64 << 10, 'w')};
    Start(fake, [stall_limit](WorkerConfig& config) {
      config.stream_buffer_bytes = 256 << 10;
      config.stream_stall_limit = stall_limit;
    });
    // By default a window grows to many megabytes while nobody reads, and the socket may be full
    // before it is. With a fixed one of less than a message, the first message that is not read
    // stalls its stream, and the socket has room for all that may be under way.
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 16 << 10);
    small_window_ =
        v1::GenerationService::NewStub(Connect(worker_->generation_address(), arguments));
  }
  v1::GenerateRequest LongRequest(const std::string& id) {
    v1::GenerateRequest request = TextRequest("x", id);
    request.mutable_stopping()->set_max_tokens(100'000);
    return request;
  }

  std::unique_ptr<v1::GenerationService::Stub> small_window_;
};

TEST_F(StreamLimitsTest, SlowReaderLosesItsStreamAndIsToldWhy) {
  // It reads on in time, however busy the machine is.
  StartWithLongMessages(/*stall_limit=*/absl::Minutes(1));
  grpc::ClientContext context;
  SetDeadline(context, absl::Seconds(50));
  auto reader = small_window_->Generate(&context, LongRequest("slow"));
  ASSERT_TRUE(Eventually([&] { return engine_->slow_consumers() == 1; }));
  v1::GenerateResponse message;
  while (reader->Read(&message)) {
  }
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_EQ(DescribeError(status).reason, "SLOW_CONSUMER");
}

TEST_F(StreamLimitsTest, ReaderThatNeverReadsIsCutOffAndNobodyElseNotices) {
  StartWithLongMessages(/*stall_limit=*/absl::Seconds(1));
  auto context = std::make_unique<grpc::ClientContext>();
  SetDeadline(*context, absl::Seconds(50));
  auto reader = small_window_->Generate(context.get(), LongRequest("never"));
  ASSERT_TRUE(Eventually([&] { return engine_->slow_consumers() == 1; }));
  v1::GenerateRequest request = TextRequest("x");
  // Few enough to be queued as a whole: a busy machine makes a slow reader of anyone.
  request.mutable_stopping()->set_max_tokens(2);
  EXPECT_TRUE(Generate(request).status.ok());
  // With the stalled stream still open a drain would wait for it; after the limit it is gone.
  EXPECT_TRUE(Eventually([&] { return worker_->active_calls() == 0; }));
  context->TryCancel();
  v1::GenerateResponse message;
  while (reader->Read(&message)) {
  }
  EXPECT_FALSE(reader->Finish().ok());
}

TEST_F(StreamLimitsTest, SlowButSteadyReaderGetsEverything) {
  testing_support::FakeEngineOptions fake;
  fake.step = absl::Microseconds(100);
  Start(fake);
  v1::GenerateRequest request = TextRequest("x");
  request.mutable_stopping()->set_max_tokens(400);
  grpc::ClientContext context;
  SetDeadline(context);
  auto reader = generation_->Generate(&context, request);
  v1::GenerateResponse message;
  int tokens = 0;
  while (reader->Read(&message)) {
    tokens += message.token_ids_size();
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(tokens, 400);
}

// R9, at a shorter scale: the client pings as often as the library lets it, once a second, while
// the stream is silent.
class KeepaliveTest : public WorkerFixture {
 protected:
  GenerateResult GenerateInSilence(absl::Duration min_client_ping_interval) {
    GrpcServerOptions options;
    options.listen = "127.0.0.1:0";
    options.min_client_ping_interval = min_client_ping_interval;
    EngineSlot slot;
    WorkerMetrics metrics({.model = "m", .device = "cpu", .version = "0", .kv_dtype = "bf16"},
                          &slot);
    TaskPool pool(1, 4);
    StreamPump pump;
    GenerationServiceImpl service(&slot, &metrics, &pool, &pump, {});
    testing_support::FakeEngine engine({}, {}, nullptr);
    slot.Set(&engine);
    auto server = GrpcServer::Create(options, {&service});
    EXPECT_TRUE(server.ok()) << server.status();
    engine.Freeze(true);
    std::thread thaw([&] {
      absl::SleepFor(absl::Milliseconds(5500));
      engine.Freeze(false);
    });
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 200);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    generation_ = v1::GenerationService::NewStub(Connect((*server)->address(), arguments));
    const GenerateResult result = Generate(TextRequest("x"));
    thaw.join();
    engine.Stop();
    (*server)->Shutdown(absl::ZeroDuration());
    return result;
  }
};

TEST_F(KeepaliveTest, PingsDuringSilenceAreAllowed) {
  const GenerateResult result = GenerateInSilence(absl::Milliseconds(100));
  EXPECT_TRUE(result.status.ok()) << result.status.error_message();
}

TEST_F(KeepaliveTest, TheArgumentIsWhatAllowsThem) {
  const GenerateResult result = GenerateInSilence(absl::Minutes(5));
  EXPECT_EQ(result.status.error_code(), StatusCode::UNAVAILABLE) << result.status.error_message();
}

// The handler of such a call and the notice of its end come at once, on two threads.
TEST_F(StreamLimitsTest, CallsThatEndBeforeTheirMessageHasComeAreCancelled) {
  Start();
  constexpr int kRounds = 20, kCalls = 50;
  grpc::GenericStub stub(channel_);
  void* tag = nullptr;
  bool ok = false;
  for (int round = 0; round < kRounds; ++round) {
    grpc::CompletionQueue queue;
    std::vector<grpc::ClientContext> contexts(kCalls);
    std::vector<grpc::Status> statuses(kCalls);
    std::vector<std::unique_ptr<grpc::GenericClientAsyncReaderWriter>> calls;
    for (grpc::ClientContext& context : contexts) {
      SetDeadline(context);
      calls.push_back(
          stub.PrepareCall(&context, "/writescope.v1.GenerationService/Generate", &queue));
      calls.back()->StartCall(nullptr);
      ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
    }
    absl::SleepFor(absl::Milliseconds(10));  // The server has the calls, and waits.
    for (grpc::ClientContext& context : contexts) context.TryCancel();
    for (int i = 0; i < kCalls; ++i) calls[i]->Finish(&statuses[i], nullptr);
    for (int i = 0; i < kCalls; ++i) ASSERT_TRUE(queue.Next(&tag, &ok));
    for (const grpc::Status& status : statuses) {
      EXPECT_EQ(status.error_code(), StatusCode::CANCELLED);
    }
  }
  const std::string cancelled = absl::StrCat(
      R"(code="CANCELLED",finish_reason="none",method="Generate"} )", kRounds * kCalls);
  EXPECT_TRUE(
      Eventually([&] { return MetricsText().find(cancelled + "\n") != std::string::npos; }));
  // None of them was malformed.
  EXPECT_NE(
      MetricsText().find(R"(code="INVALID_ARGUMENT",finish_reason="none",method="Generate"} 0)"),
      std::string::npos);
}

}  // namespace
}  // namespace writescope::server
