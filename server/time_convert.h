// Abseil's times to and from protobuf's.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/timestamp.pb.h"

namespace writescope::server {

// What is beyond the range of google.protobuf.Duration (10,000 years) becomes its end.
inline google::protobuf::Duration ToProto(absl::Duration duration) {
  constexpr int64_t kLimitSeconds = 315'576'000'000;
  duration = std::clamp(duration, absl::Seconds(-kLimitSeconds), absl::Seconds(kLimitSeconds));
  absl::Duration rest;
  google::protobuf::Duration proto;
  proto.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &rest));
  proto.set_nanos(static_cast<int32_t>(rest / absl::Nanoseconds(1)));
  return proto;
}

inline google::protobuf::Timestamp ToProto(absl::Time time) {
  google::protobuf::Timestamp proto;
  const google::protobuf::Duration since_epoch = ToProto(time - absl::UnixEpoch());
  proto.set_seconds(since_epoch.seconds());
  proto.set_nanos(since_epoch.nanos());
  if (proto.nanos() < 0) {
    proto.set_seconds(proto.seconds() - 1);
    proto.set_nanos(proto.nanos() + 1'000'000'000);
  }
  return proto;
}

inline absl::Duration FromProto(const google::protobuf::Duration& proto) {
  return absl::Seconds(proto.seconds()) + absl::Nanoseconds(proto.nanos());
}

inline absl::Time FromProto(const google::protobuf::Timestamp& proto) {
  return absl::UnixEpoch() + absl::Seconds(proto.seconds()) + absl::Nanoseconds(proto.nanos());
}

}  // namespace writescope::server
