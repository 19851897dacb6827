#include "tests/server/worker_fixture.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <sstream>
#include <utility>

#include "absl/time/clock.h"
#include "grpcpp/generic/generic_stub.h"
#include "prometheus/text_serializer.h"

namespace writescope::server {

bool Eventually(const std::function<bool()>& condition, absl::Duration timeout) {
  const absl::Time end = absl::Now() + timeout;
  while (!condition()) {
    if (absl::Now() >= end) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return true;
}

RawResult RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                  const std::string& request) {
  RawResult result;
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  SetDeadline(context);
  grpc::CompletionQueue queue;
  void* tag = nullptr;
  bool ok = false;
  auto call = stub.PrepareCall(&context, method, &queue);
  call->StartCall(nullptr);
  queue.Next(&tag, &ok);
  const grpc::Slice slice(request);
  if (ok) {
    call->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
    queue.Next(&tag, &ok);
  }
  while (ok) {
    grpc::ByteBuffer message;
    call->Read(&message, nullptr);
    queue.Next(&tag, &ok);
    if (!ok) break;
    grpc::Slice bytes;
    EXPECT_TRUE(message.DumpToSingleSlice(&bytes).ok());
    result.messages.emplace_back(reinterpret_cast<const char*>(bytes.begin()), bytes.size());
  }
  call->Finish(&result.status, nullptr);
  queue.Next(&tag, &ok);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
  return result;
}

std::string Scrape(const std::string& address) {
  const size_t colon = address.rfind(':');
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  EXPECT_EQ(getaddrinfo(address.substr(0, colon).c_str(), address.substr(colon + 1).c_str(), &hints,
                        &found),
            0);
  const int fd = socket(found->ai_family, found->ai_socktype, 0);
  std::string text;
  if (connect(fd, found->ai_addr, found->ai_addrlen) == 0) {
    const std::string request = "GET /metrics HTTP/1.0\r\nHost: x\r\n\r\n";
    EXPECT_EQ(write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
    char buffer[16384];
    for (ssize_t n = 0; (n = read(fd, buffer, sizeof(buffer))) > 0;) {
      text.append(buffer, static_cast<size_t>(n));
    }
  }
  close(fd);
  freeaddrinfo(found);
  const size_t body = text.find("\r\n\r\n");
  return body == std::string::npos ? "" : text.substr(body + 4);
}

void WorkerFixture::ListenOnly(const std::function<void(WorkerConfig&)>& edit) {
  WorkerConfig config;
  config.engine.model_dir = "/models/fake/";
  config.listen = config.control_listen = "127.0.0.1:0";
  config.metrics_listen = "";
  config.shutdown_grace = absl::Seconds(2);
  if (edit) edit(config);
  worker_ = std::make_unique<Worker>(config);
  const absl::Status status = worker_->Listen();
  ASSERT_TRUE(status.ok()) << status;
  channel_ = Connect(worker_->generation_address());
  control_channel_ = Connect(worker_->control_address());
  generation_ = v1::GenerationService::NewStub(channel_);
  control_ = v1::WorkerControlService::NewStub(control_channel_);
}

void WorkerFixture::Load(testing_support::FakeEngineOptions fake) {
  const absl::Status status = worker_->Load(
      [&](const runtime::EngineOptions& options,
          runtime::EngineObserver* observer) -> absl::StatusOr<std::unique_ptr<runtime::Engine>> {
        auto engine =
            std::make_unique<testing_support::FakeEngine>(options, std::move(fake), observer);
        engine_ = engine.get();
        return engine;
      });
  ASSERT_TRUE(status.ok()) << status;
}

void WorkerFixture::Start(testing_support::FakeEngineOptions fake,
                          const std::function<void(WorkerConfig&)>& edit) {
  ASSERT_NO_FATAL_FAILURE(ListenOnly(edit));
  ASSERT_NO_FATAL_FAILURE(Load(std::move(fake)));
}

void WorkerFixture::TearDown() {
  // A drained worker has no engine any more.
  if (worker_ != nullptr && worker_->slot().engine() != nullptr) engine_->Freeze(false);
  worker_.reset();
}

std::shared_ptr<grpc::Channel> WorkerFixture::Connect(const std::string& address,
                                                      grpc::ChannelArguments arguments) const {
  arguments.SetMaxReceiveMessageSize(-1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

GenerateResult WorkerFixture::Generate(const v1::GenerateRequest& request, absl::Duration timeout) {
  GenerateResult result;
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  auto reader = generation_->Generate(&context, request);
  v1::GenerateResponse message;
  while (reader->Read(&message)) {
    result.text += message.text();
    result.messages.push_back(message);
  }
  result.status = reader->Finish();
  return result;
}

grpc::health::v1::HealthCheckResponse::ServingStatus WorkerFixture::Health(
    const std::string& service, bool control) {
  auto stub = grpc::health::v1::Health::NewStub(control ? control_channel_ : channel_);
  grpc::ClientContext context;
  SetDeadline(context);
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  grpc::health::v1::HealthCheckResponse response;
  const grpc::Status status = stub->Check(&context, request, &response);
  if (status.error_code() == grpc::StatusCode::NOT_FOUND) {
    return grpc::health::v1::HealthCheckResponse::SERVICE_UNKNOWN;
  }
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response.status();
}

std::string WorkerFixture::MetricsText() const {
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, worker_->metrics().Collect());
  return out.str();
}

v1::GenerateRequest TextRequest(const std::string& text, const std::string& id) {
  v1::GenerateRequest request;
  request.set_text(text);
  request.set_request_id(id);
  return request;
}

}  // namespace writescope::server
