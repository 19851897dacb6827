#include "server/grpc_server.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/temp_dir.h"

namespace writescope::server {
namespace {

// A worker that drains and its successor must not share a path: the first would take it along.
TEST(GrpcServer, AUnixSocketInUseIsNotTaken) {
  const testing_support::TempDir dir;
  GrpcServerOptions options;
  options.listen = absl::StrCat("unix:", dir.path(), "/s");
  auto first = GrpcServer::Create(options, {});
  ASSERT_TRUE(first.ok()) << first.status();
  for (const std::string& listen : {options.listen, absl::StrCat("unix://", dir.path(), "/s")}) {
    GrpcServerOptions same = options;
    same.listen = listen;
    EXPECT_EQ(GrpcServer::Create(same, {}).status().code(), absl::StatusCode::kUnavailable)
        << listen;
  }
  first->reset();
  EXPECT_TRUE(GrpcServer::Create(options, {}).ok());
}

}  // namespace
}  // namespace writescope::server
