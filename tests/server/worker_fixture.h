// A worker over loopback, on free ports, with a FakeEngine behind it, and clients for it.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "server/status_mapping.h"
#include "server/worker.h"
#include "tests/support/fake_engine.h"
#include "writescope/v1/control.grpc.pb.h"
#include "writescope/v1/generation.grpc.pb.h"

namespace writescope::server {

// Client contexts always have a deadline: without one a lost message can hang a client for ever.
inline void SetDeadline(grpc::ClientContext& context, absl::Duration timeout = absl::Seconds(20)) {
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
}

// Whether `condition` comes true in time.
bool Eventually(const std::function<bool()>& condition, absl::Duration timeout = absl::Seconds(10));

struct GenerateResult {
  grpc::Status status;
  std::vector<v1::GenerateResponse> messages;
  std::string text;
  std::string reason() const { return DescribeError(status).reason; }
};

// Any method, with any bytes as its request.
struct RawResult {
  grpc::Status status;
  std::vector<std::string> messages;
};
RawResult RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                  const std::string& request);

// The body of GET /metrics.
std::string Scrape(const std::string& address);

class WorkerFixture : public ::testing::Test {
 protected:
  // Listens and loads.
  void Start(testing_support::FakeEngineOptions fake = {},
             const std::function<void(WorkerConfig&)>& edit = {});
  void ListenOnly(const std::function<void(WorkerConfig&)>& edit = {});
  void Load(testing_support::FakeEngineOptions fake = {});
  void TearDown() override;

  std::shared_ptr<grpc::Channel> Connect(const std::string& address,
                                         grpc::ChannelArguments arguments = {}) const;
  GenerateResult Generate(const v1::GenerateRequest& request,
                          absl::Duration timeout = absl::Seconds(20));
  grpc::health::v1::HealthCheckResponse::ServingStatus Health(const std::string& service,
                                                              bool control = false);

  // What a scrape would give; without a port for it, whose closing takes the library two seconds.
  std::string MetricsText() const;

  std::unique_ptr<Worker> worker_;
  testing_support::FakeEngine* engine_ = nullptr;
  std::shared_ptr<grpc::Channel> channel_;
  std::shared_ptr<grpc::Channel> control_channel_;
  std::unique_ptr<v1::GenerationService::Stub> generation_;
  std::unique_ptr<v1::WorkerControlService::Stub> control_;
};

v1::GenerateRequest TextRequest(const std::string& text, const std::string& id = "");

}  // namespace writescope::server
