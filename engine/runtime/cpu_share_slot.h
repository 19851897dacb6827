// The share table in force: versioned, bounded, expiring.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "engine/base/clock.h"
#include "engine/roofline/share_table.h"
#include "engine/runtime/engine.h"

namespace writescope::runtime {

// Thread-safe. While no update's lease runs, the engine's own table is in force.
class CpuShareSlot {
 public:
  CpuShareSlot(roofline::ShareTable own, roofline::ShareInterval interval, Clock& clock);

  // INVALID_ARGUMENT for a table or lease that makes no sense; it leaves everything as it was.
  // Otherwise applied, clamped or stale, each with what is in force afterwards. Stale is an update
  // whose generation is not above the one in force, or one of another controller while a lease
  // runs.
  absl::StatusOr<ShareReply> Offer(const ShareUpdate& update);

  // The share for a step, and which generation it is of.
  double Lookup(int batch_size, int64_t spilled_bytes, int64_t* generation);
  ShareState State();
  void SetLastShare(double share);
  // When what the engine knows of the machine has changed.
  void SetOwn(roofline::ShareTable table);

 private:
  ShareState StateLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool LeaseRunsLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const roofline::ShareInterval interval_;
  Clock& clock_;
  std::mutex mutex_;
  roofline::ShareTable own_ ABSL_GUARDED_BY(mutex_);
  roofline::ShareTable table_ ABSL_GUARDED_BY(mutex_);
  int64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string controller_id_ ABSL_GUARDED_BY(mutex_);
  absl::Time expires_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Time updated_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  double last_share_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace writescope::runtime
