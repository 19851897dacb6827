#include "server/status_mapping.h"

#include <gtest/gtest.h>

#include <string>

#include "engine/base/utf8.h"
#include "engine/runtime/error_reason.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace writescope::server {
namespace {

TEST(StatusMapping, EveryCodeKeepsItsNumberAndName) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "what happened");
    const grpc::Status mapped = ToGrpcStatus(status);
    EXPECT_EQ(static_cast<int>(mapped.error_code()), code);
    EXPECT_EQ(mapped.error_message(), "what happened");
    // No reason of our own: the code's name.
    EXPECT_EQ(DescribeError(mapped).reason, DescribeError(mapped).code_name);
  }
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
}

TEST(StatusMapping, CarriesReasonAndMetadata) {
  absl::Status status = runtime::WithReason(
      absl::InvalidArgumentError("the prompt has 12 tokens, the context holds 8"),
      "CONTEXT_LENGTH_EXCEEDED");
  status = WithMetadata(status, "prompt_tokens", "12");
  status = WithMetadata(status, "max_context_tokens", "8");
  const ErrorDescription error = DescribeError(ToGrpcStatus(status));
  EXPECT_EQ(error.code_name, "INVALID_ARGUMENT");
  EXPECT_EQ(error.reason, "CONTEXT_LENGTH_EXCEEDED");
  EXPECT_EQ(error.metadata.at("prompt_tokens"), "12");
  EXPECT_EQ(error.metadata.at("max_context_tokens"), "8");
}

google::rpc::Status Rich(const absl::Status& status) {
  google::rpc::Status rich;
  EXPECT_TRUE(rich.ParseFromString(ToGrpcStatus(status).error_details()));
  return rich;
}

TEST(StatusMapping, FullQueueTellsWhenToComeBack) {
  const google::rpc::Status rich =
      Rich(runtime::WithReason(absl::ResourceExhaustedError("full"), "QUEUE_FULL"));
  ASSERT_EQ(rich.details_size(), 2);
  google::rpc::RetryInfo retry;
  ASSERT_TRUE(rich.details(1).UnpackTo(&retry));
  EXPECT_GT(retry.retry_delay().seconds(), 0);
  EXPECT_EQ(rich.details(0).type_url(), "type.googleapis.com/google.rpc.ErrorInfo");
}

TEST(StatusMapping, FieldBecomesABadRequest) {
  const google::rpc::Status rich =
      Rich(WithMetadata(absl::InvalidArgumentError("top_p: 7"), "field", "sampling.top_p"));
  ASSERT_EQ(rich.details_size(), 2);
  google::rpc::BadRequest bad;
  ASSERT_TRUE(rich.details(1).UnpackTo(&bad));
  EXPECT_EQ(bad.field_violations(0).field(), "sampling.top_p");
}

TEST(StatusMapping, FitsIntoATrailer) {
  absl::Status status = absl::InternalError(std::string(100'000, 'x') + "\xff");
  for (int i = 0; i < 100; ++i) {
    status = WithMetadata(status, "key" + std::to_string(i), std::string(10'000, 'y'));
  }
  const grpc::Status mapped = ToGrpcStatus(status);
  EXPECT_LT(mapped.error_message().size() + mapped.error_details().size() * 4 / 3, 8000u);
}

TEST(StatusMapping, MessageIsRepaired) {
  const grpc::Status mapped = ToGrpcStatus(absl::InternalError("broken \xe6\xad"));
  EXPECT_TRUE(IsWholeUtf8(mapped.error_message()));
  google::rpc::Status rich;
  EXPECT_TRUE(rich.ParseFromString(mapped.error_details()));
}

}  // namespace
}  // namespace writescope::server
