#include "server/control_convert.h"

#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/base/utf8.h"
#include "server/proto_numbers.h"
#include "server/time_convert.h"

namespace writescope::server {
void ToProto(const runtime::StepStats& stats, v1::StepTelemetry* proto) {
  proto->set_step(ToUint64(stats.step));
  proto->set_kind(stats.kind == runtime::StepKind::kDecode ? v1::STEP_KIND_DECODE
                                                           : v1::STEP_KIND_PREFILL);
  *proto->mutable_end_time() = ToProto(stats.end_time);
  proto->set_step_seconds(stats.step_seconds);
  proto->set_batch_size(ToUint32(stats.batch_size));
  proto->set_prefill_tokens(ToUint32(stats.prefill_tokens));
  proto->set_spilled_bytes(ToUint64(stats.spilled_bytes));
  proto->set_stream_region_bytes(ToUint64(stats.stream_region_bytes));
  proto->set_host_region_bytes(ToUint64(stats.host_region_bytes));
  proto->set_cpu_bytes(ToUint64(stats.cpu_bytes));
  proto->set_link_bytes(ToUint64(stats.link_bytes));
  proto->set_resident_bytes(ToUint64(stats.resident_bytes));
  proto->set_cpu_busy_seconds(stats.cpu_busy_seconds);
  proto->set_link_busy_seconds(stats.link_busy_seconds);
  proto->set_both_busy_seconds(stats.both_busy_seconds);
  proto->set_dense_seconds(stats.dense_seconds);
  proto->set_device_attention_seconds(stats.device_attention_seconds);
  proto->set_cpu_bytes_both_busy(ToUint64(stats.cpu_bytes_both_busy));
  proto->set_link_bytes_both_busy(ToUint64(stats.link_bytes_both_busy));
  proto->set_copies(ToUint32(stats.copies));
  proto->set_cpu_workers(ToUint32(stats.cpu_workers));
  proto->set_observed_cpu_share(stats.observed_cpu_share);
  proto->set_planned_cpu_share(stats.planned_cpu_share);
  proto->set_share_generation(ToUint64(stats.share_generation));
  proto->set_moved_bytes_total(ToUint64(stats.moved_bytes_total));
  proto->set_predicted_step_seconds(stats.predicted_step_seconds);
}

void ToProto(const runtime::ShareState& state, v1::ShareState* proto) {
  proto->set_generation(ToUint64(state.generation));
  proto->set_controller_id(RepairUtf8(state.controller_id));
  for (const roofline::ShareBucket& bucket : state.table.buckets) {
    v1::ShareBucket* const out = proto->add_buckets();
    out->set_max_batch(bucket.max_batch);
    for (const roofline::SharePoint& point : bucket.points) {
      v1::SharePoint* const out_point = out->add_points();
      out_point->set_spilled_bytes(point.spilled_bytes);
      out_point->set_cpu_share(point.share);
    }
  }
  *proto->mutable_expires_in() = ToProto(state.expires_in);
  proto->set_min_cpu_share(state.min_cpu_share);
  proto->set_max_cpu_share(state.max_cpu_share);
  proto->set_last_cpu_share(state.last_cpu_share);
  if (state.since_update.has_value()) *proto->mutable_since_update() = ToProto(*state.since_update);
}

void ToProto(const runtime::RegionState& state, v1::RegionState* proto) {
  switch (state.region) {
    case runtime::RegionName::kDevice:
      proto->set_region(v1::REGION_DEVICE);
      break;
    case runtime::RegionName::kStream:
      proto->set_region(v1::REGION_STREAM);
      break;
    case runtime::RegionName::kSwing:
      proto->set_region(v1::REGION_SWING);
      break;
    case runtime::RegionName::kHost:
      proto->set_region(v1::REGION_HOST);
      break;
  }
  proto->set_capacity_bytes(ToUint64(state.capacity_bytes));
  proto->set_used_bytes(ToUint64(state.used_bytes));
  proto->set_cached_bytes(ToUint64(state.cached_bytes));
  proto->set_retained_bytes(ToUint64(state.retained_bytes));
  proto->set_page_locked(state.page_locked);
}

void ToProto(const roofline::MachineProfile& profile, v1::MachineProfile* proto) {
  proto->set_name(RepairUtf8(profile.name));
  proto->set_cpu_alone(profile.rates.cpu_alone);
  proto->set_cpu_with_link(profile.rates.cpu_with_link);
  proto->set_link_alone(profile.rates.link_alone);
  proto->set_link_with_cpu(profile.rates.link_with_cpu);
  proto->set_device(profile.rates.device);
  proto->set_cpu_workers(ToUint32(profile.cpu_workers));
  *proto->mutable_handoff_per_layer() = ToProto(absl::Seconds(profile.handoff_per_layer_seconds));
  *proto->mutable_copy_overhead() = ToProto(absl::Seconds(profile.copy_overhead_seconds));
  proto->set_device_budget_bytes(ToUint64(profile.device_budget_bytes));
  proto->set_host_budget_bytes(ToUint64(profile.host_budget_bytes));
  proto->set_measured(profile.measured);
  proto->set_num_layers(ToUint32(profile.num_layers));
}

v1::ShareOutcome ToProto(runtime::ShareOutcome outcome) {
  switch (outcome) {
    case runtime::ShareOutcome::kApplied:
      return v1::SHARE_OUTCOME_APPLIED;
    case runtime::ShareOutcome::kClamped:
      return v1::SHARE_OUTCOME_CLAMPED;
    case runtime::ShareOutcome::kStale:
      return v1::SHARE_OUTCOME_STALE;
  }
  return v1::SHARE_OUTCOME_UNSPECIFIED;
}

const char* OutcomeName(runtime::ShareOutcome outcome) {
  switch (outcome) {
    case runtime::ShareOutcome::kApplied:
      return "applied";
    case runtime::ShareOutcome::kClamped:
      return "clamped";
    case runtime::ShareOutcome::kStale:
      return "stale";
  }
  return "unknown";
}

absl::StatusOr<runtime::ShareUpdate> FromProto(const v1::SetCpuShareRequest& proto) {
  constexpr size_t kMaxTextBytes = 256;
  runtime::ShareUpdate update;
  if (proto.controller_id().empty() || proto.controller_id().size() > kMaxTextBytes) {
    return InvalidField("controller_id", absl::StrCat("has ", proto.controller_id().size(),
                                                      " bytes; from 1 to ", kMaxTextBytes));
  }
  if (proto.reason().size() > kMaxTextBytes) {
    return InvalidField(
        "reason", absl::StrCat("has ", proto.reason().size(), " bytes; at most ", kMaxTextBytes));
  }
  if (proto.generation() == 0 ||
      proto.generation() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return InvalidField("generation", absl::StrCat(proto.generation(), " is not in [1, 2^63)"));
  }
  if (proto.buckets().empty()) return InvalidField("buckets", "the table is empty");
  update.controller_id = proto.controller_id();
  update.reason = proto.reason();
  update.generation = static_cast<int64_t>(proto.generation());
  for (const v1::ShareBucket& bucket : proto.buckets()) {
    roofline::ShareBucket& out = update.table.buckets.emplace_back();
    out.max_batch = bucket.max_batch();
    for (const v1::SharePoint& point : bucket.points()) {
      out.points.push_back({.spilled_bytes = point.spilled_bytes(), .share = point.cpu_share()});
    }
  }
  const google::protobuf::Duration& lease = proto.valid_for();
  if (lease.nanos() < 0 || lease.nanos() > 999'999'999 || lease.seconds() < 0 ||
      (lease.seconds() == 0 && lease.nanos() == 0)) {
    return InvalidField("valid_for", absl::StrCat("the lease of ", lease.seconds(), " s and ",
                                                  lease.nanos(), " ns is not above 0"));
  }
  update.valid_for = FromProto(lease);
  return update;
}

}  // namespace writescope::server
