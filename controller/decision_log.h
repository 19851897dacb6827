// The decision log: every decision with all that it was made from, one JSON object a line, so that
// a tool can make it again with other settings.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "controller/policy.h"

namespace writescope::controller {

struct DecisionRecord {
  absl::Time time;
  std::string controller_id;
  std::string worker_id;
  bool shadow = false;
  bool meet = false;
  PolicyInput input;
  Decision decision;
  // Of the last step before the decision.
  double measured_step_seconds = 0;
  double observed_share = 0;
  // Of the push: "applied", "clamped", "stale", "error", or empty when nothing was sent.
  std::string outcome;
  uint64_t generation = 0;
};

// Without the line end. input.in_force and, for a decision to hold, decision.table are left out:
// they are what earlier lines pushed.
std::string DecisionToJson(const DecisionRecord& record);
// INVALID_ARGUMENT naming the field. Unknown fields are passed over: a newer writer may add some.
absl::StatusOr<DecisionRecord> DecisionFromJson(std::string_view line);

// Appends to a file, flushing each line. At its size limit the file becomes "PATH.1", in place of
// an older one, so that the two never take more than twice the limit. Not thread-safe.
class DecisionLog {
 public:
  static absl::StatusOr<std::unique_ptr<DecisionLog>> Create(const std::string& path,
                                                             int64_t max_bytes);

  absl::Status Append(const DecisionRecord& record);

 private:
  struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  DecisionLog(std::string path, int64_t max_bytes)
      : path_(std::move(path)), max_bytes_(max_bytes) {}
  absl::Status Open();

  const std::string path_;
  const int64_t max_bytes_;
  int64_t size_bytes_ = 0;
  std::unique_ptr<std::FILE, CloseFile> file_;
};

}  // namespace writescope::controller
