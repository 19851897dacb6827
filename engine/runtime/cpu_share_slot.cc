#include "engine/runtime/cpu_share_slot.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"

namespace writescope::runtime {
namespace {

// Nobody could follow a generation near the end of the range. Clocks in nanoseconds may count them.
constexpr int64_t kMaxGenerationStep = int64_t{1} << 61;
// A longer lease would outlive any controller's death by too much.
constexpr absl::Duration kMaxLease = absl::Hours(24);
// A person's word goes before that of any controller, which then stands by until the lease ends.
constexpr char kOperatorPrefix[] = "operator:";

}  // namespace

CpuShareSlot::CpuShareSlot(roofline::ShareTable own, roofline::ShareInterval interval, Clock& clock)
    : interval_(interval), clock_(clock), own_(std::move(own)) {
  roofline::ClampTable(own_, interval_);
}

absl::StatusOr<ShareReply> CpuShareSlot::Offer(const ShareUpdate& update) {
  RETURN_IF_ERROR(update.table.Validate());
  if (update.generation <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("generation ", update.generation, "; it has to be at least 1"));
  }
  if (update.valid_for <= absl::ZeroDuration() || update.valid_for > kMaxLease) {
    return absl::InvalidArgumentError(
        absl::StrCat("valid_for is ", absl::FormatDuration(update.valid_for),
                     "; it has to be above 0 and at most ", absl::FormatDuration(kMaxLease)));
  }
  std::lock_guard lock(mutex_);
  if (update.generation - generation_ > kMaxGenerationStep) {
    return absl::InvalidArgumentError(absl::StrCat("generation ", update.generation,
                                                   " is more than 2^61 above ", generation_,
                                                   ", the one in force"));
  }
  ShareReply reply;
  const bool is_operator = absl::StartsWith(update.controller_id, kOperatorPrefix);
  const bool other_holds =
      LeaseRunsLocked() && controller_id_ != update.controller_id && !is_operator;
  if (update.generation <= generation_ || other_holds) {
    reply.outcome = ShareOutcome::kStale;
  } else {
    table_ = update.table;
    const int moved = roofline::ClampTable(table_, interval_);
    reply.outcome = moved > 0 ? ShareOutcome::kClamped : ShareOutcome::kApplied;
    generation_ = update.generation;
    controller_id_ = update.controller_id;
    updated_at_ = clock_.Now();
    expires_at_ = updated_at_ + update.valid_for;
  }
  reply.in_force = StateLocked();
  return reply;
}

bool CpuShareSlot::LeaseRunsLocked() { return clock_.Now() < expires_at_; }

double CpuShareSlot::Lookup(int batch_size, int64_t spilled_bytes, int64_t* generation) {
  std::lock_guard lock(mutex_);
  const bool leased = LeaseRunsLocked();
  *generation = leased ? generation_ : 0;
  return (leased ? table_ : own_)
      .Lookup(static_cast<uint32_t>(batch_size), static_cast<uint64_t>(spilled_bytes));
}

ShareState CpuShareSlot::State() {
  std::lock_guard lock(mutex_);
  return StateLocked();
}

ShareState CpuShareSlot::StateLocked() {
  const absl::Time now = clock_.Now();
  const bool leased = LeaseRunsLocked();
  ShareState state;
  state.generation = generation_;
  state.controller_id = leased ? controller_id_ : "";
  state.table = leased ? table_ : own_;
  state.expires_in = leased ? expires_at_ - now : absl::ZeroDuration();
  state.min_cpu_share = interval_.min_share;
  state.max_cpu_share = interval_.max_share;
  state.last_cpu_share = last_share_;
  if (updated_at_ != absl::InfinitePast()) state.since_update = now - updated_at_;
  return state;
}

void CpuShareSlot::SetLastShare(double share) {
  std::lock_guard lock(mutex_);
  last_share_ = share;
}

void CpuShareSlot::SetOwn(roofline::ShareTable table) {
  std::lock_guard lock(mutex_);
  own_ = std::move(table);
  roofline::ClampTable(own_, interval_);
}

}  // namespace writescope::runtime
