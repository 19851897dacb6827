// Steps that should succeed under a wait limit which is short for the failures of the same test.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace writescope::testing {

template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}
template <typename T>
const absl::Status& StatusOf(const T& output) {
  return output.status;
}

// What `step` gives, which has another try where it missed its limit: on a busy machine a thread
// can wait for as long, and that is no fault. One that never ends in time fails here too.
template <typename Step>
auto WithTries(Step step) {
  constexpr int kTries = 4;
  for (int i = 1;; ++i) {
    auto result = step();
    if (!absl::IsDeadlineExceeded(StatusOf(result)) || i == kTries) return result;
  }
}

}  // namespace writescope::testing
