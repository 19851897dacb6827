// What the controller knows of a worker, without the wire: plain structs and the interface that the
// control loop runs on. Field meanings are those of proto/writescope/v1/control.proto.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/roofline/machine_profile.h"
#include "engine/roofline/share_table.h"

namespace writescope::controller {

enum class StepKind { kDecode, kPrefill };

struct StepSample {
  uint64_t step = 0;
  StepKind kind = StepKind::kDecode;
  double step_seconds = 0;
  uint32_t batch_size = 0;
  uint32_t prefill_tokens = 0;
  uint64_t spilled_bytes = 0;
  uint64_t stream_region_bytes = 0;
  uint64_t host_region_bytes = 0;
  uint64_t cpu_bytes = 0;
  uint64_t link_bytes = 0;
  uint64_t resident_bytes = 0;
  double cpu_busy_seconds = 0;
  double link_busy_seconds = 0;
  double both_busy_seconds = 0;
  double dense_seconds = 0;
  double device_attention_seconds = 0;
  uint64_t cpu_bytes_both_busy = 0;
  uint64_t link_bytes_both_busy = 0;
  double observed_cpu_share = 0;
  double planned_cpu_share = 0;
  uint64_t share_generation = 0;
};

// Steps that arrived on a stream since the last call.
struct StepBatch {
  // Counts the times that the stream was opened; another number means another connection, perhaps
  // another worker. 0: never yet.
  uint64_t stream = 0;
  bool connected = false;
  uint64_t dropped = 0;           // Lost because this side was too slow.
  std::vector<StepSample> steps;  // Of this stream only, oldest first.
};

struct ShareState {
  uint64_t generation = 0;
  std::string controller_id;  // Empty: the worker's own roofline is in force.
  roofline::ShareTable table;
  absl::Duration expires_in;  // Of the running lease; 0 without one.
  roofline::ShareInterval allowed;
  double last_cpu_share = 0;
};

struct WorkerState {
  std::string worker_id;
  std::string version;
  std::string model;
  std::string device;
  absl::Time start_time;
  std::string phase;
  uint32_t running_requests = 0;
  uint32_t waiting_requests = 0;
  uint64_t host_capacity_bytes = 0;  // Of all regions outside the device.
  uint64_t steps_total = 0;
  bool meet = false;  // The cut is found within each step; the table is what it plans with.
  ShareState share;
};

struct ShareUpdate {
  std::string controller_id;
  uint64_t generation = 0;
  roofline::ShareTable table;
  absl::Duration valid_for;
  std::string reason;
};

enum class ShareOutcome { kApplied, kClamped, kStale };

struct ShareReply {
  ShareOutcome outcome = ShareOutcome::kApplied;
  ShareState in_force;
};

// A worker as seen by one controller. Every call ends within a bounded time. One thread calls.
class WorkerClient {
 public:
  virtual ~WorkerClient() = default;

  // Waits at most `timeout` for a step. Without a connection it waits all the same, and says so;
  // the stream is opened again by itself.
  virtual StepBatch WatchSteps(absl::Duration timeout) = 0;
  virtual absl::StatusOr<WorkerState> GetWorkerState() = 0;
  virtual absl::StatusOr<roofline::MachineProfile> GetMachineProfile() = 0;
  // An error leaves open whether the update was taken.
  virtual absl::StatusOr<ShareReply> SetCpuShare(const ShareUpdate& update) = 0;
};

}  // namespace writescope::controller
