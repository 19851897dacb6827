#include "controller/metrics_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "tests/controller/http_get.h"

namespace writescope::controller {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(MetricsServerTest, ServesMetricsAndHealth) {
  const auto registry = std::make_shared<prometheus::Registry>();
  prometheus::BuildGauge().Name("answer").Help("h").Register(*registry).Add({}).Set(42);
  const auto server = MetricsServer::Create("127.0.0.1:0", registry);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_THAT((*server)->address(), StartsWith("127.0.0.1:"));
  EXPECT_THAT((*server)->address(), testing::Not(HasSubstr(":0")));
  const std::string metrics = HttpGet((*server)->address(), "/metrics");
  EXPECT_THAT(metrics, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(metrics, HasSubstr("answer 42"));
  EXPECT_THAT(HttpGet((*server)->address(), "/healthz"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(HttpGet((*server)->address(), "/nothing"), StartsWith("HTTP/1.1 404"));
}

// Port scanners, load balancers and browsers connect and say nothing. A probe that had to wait for
// them would have the controller restarted.
TEST(MetricsServerTest, SilentConnectionsDoNotStopProbes) {
  const auto server =
      MetricsServer::Create("127.0.0.1:0", std::make_shared<prometheus::Registry>());
  ASSERT_TRUE(server.ok()) << server.status();
  const std::vector<int> silent = ConnectSilently((*server)->address(), 12);
  const absl::Time start = absl::Now();
  EXPECT_THAT(HttpGet((*server)->address(), "/healthz"), StartsWith("HTTP/1.1 200"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  for (const int fd : silent) close(fd);
}

TEST(MetricsServerTest, SaysWhenThePortIsTaken) {
  const auto registry = std::make_shared<prometheus::Registry>();
  const auto first = MetricsServer::Create("127.0.0.1:0", registry);
  ASSERT_TRUE(first.ok());
  const auto second = MetricsServer::Create((*first)->address(), registry);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr((*first)->address()));
  EXPECT_FALSE(MetricsServer::Create("nonsense:x", registry).ok());
}

}  // namespace
}  // namespace writescope::controller
