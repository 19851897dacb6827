#include "server/status_mapping.h"

#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "engine/base/utf8.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace writescope::server {
namespace {

// A client's limit for all trailers together is 8 KiB by default, and the message goes out twice,
// once of them in base64.
constexpr size_t kMaxMessageBytes = 1024;
constexpr size_t kMaxMetadataBytes = 128;
constexpr int kMaxMetadataEntries = 8;

std::string Cut(std::string_view text, size_t limit) {
  if (text.size() <= limit) return RepairUtf8(text);
  return RepairUtf8(text.substr(0, limit - 3)) + "...";
}

}  // namespace

std::string CodeName(grpc::StatusCode code) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const auto code = static_cast<grpc::StatusCode>(status.code());
  const std::string message =
      Cut(std::string_view(status.message().data(), status.message().size()), kMaxMessageBytes);

  google::rpc::ErrorInfo info;
  const std::string reason = runtime::ErrorReason(status);
  info.set_reason(reason.empty() ? CodeName(code) : Cut(reason, kMaxMetadataBytes));
  info.set_domain(kErrorDomain);
  const std::string prefix(runtime::kErrorMetadataPrefix);
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& value) {
    if (!absl::StartsWith(url, prefix) || info.metadata_size() >= kMaxMetadataEntries) return;
    const absl::string_view name = absl::StripPrefix(url, prefix);
    (*info.mutable_metadata())[Cut({name.data(), name.size()}, kMaxMetadataBytes)] =
        Cut(std::string(value), kMaxMetadataBytes);
  });

  google::rpc::Status rich;
  rich.set_code(static_cast<int>(code));
  rich.set_message(message);
  rich.add_details()->PackFrom(info);
  if (info.reason() == "QUEUE_FULL") {
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_seconds(1);
    rich.add_details()->PackFrom(retry);
  }
  if (const auto field = info.metadata().find("field"); field != info.metadata().end()) {
    google::rpc::BadRequest bad;
    auto* violation = bad.add_field_violations();
    violation->set_field(field->second);
    violation->set_description(Cut(message, kMaxMetadataBytes));
    rich.add_details()->PackFrom(bad);
  }
  return grpc::Status(code, message, rich.SerializeAsString());
}

ErrorDescription DescribeError(const grpc::Status& status) {
  ErrorDescription description;
  description.code_name = CodeName(status.error_code());
  description.message = status.error_message();
  google::rpc::Status rich;
  if (status.error_details().empty() || !rich.ParseFromString(status.error_details())) {
    return description;
  }
  for (const google::protobuf::Any& detail : rich.details()) {
    google::rpc::ErrorInfo info;
    if (!detail.Is<google::rpc::ErrorInfo>() || !detail.UnpackTo(&info)) continue;
    description.reason = info.reason();
    for (const auto& [name, value] : info.metadata()) description.metadata[name] = value;
  }
  return description;
}

}  // namespace writescope::server
