#include "controller/worker_client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "engine/base/clock.h"
#include "engine/base/finish_stream.h"
#include "engine/base/log.h"
#include "writescope/v1/control.grpc.pb.h"

namespace writescope::controller {
namespace {

absl::Status FromGrpc(const grpc::Status& status, const char* what) {
  if (status.ok()) return absl::OkStatus();
  // The codes of the two libraries are the same numbers.
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                      absl::StrCat(what, ": ", status.error_message()));
}

absl::Duration FromProto(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

void ToProto(absl::Duration duration, google::protobuf::Duration* proto) {
  proto->set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
  proto->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration)));
}

StepSample FromProto(const v1::StepTelemetry& proto) {
  StepSample sample;
  sample.step = proto.step();
  // An unknown kind is not learnt from.
  sample.kind = proto.kind() == v1::STEP_KIND_DECODE ? StepKind::kDecode : StepKind::kPrefill;
  sample.step_seconds = proto.step_seconds();
  sample.batch_size = proto.batch_size();
  sample.prefill_tokens = proto.prefill_tokens();
  sample.spilled_bytes = proto.spilled_bytes();
  sample.stream_region_bytes = proto.stream_region_bytes();
  sample.host_region_bytes = proto.host_region_bytes();
  sample.cpu_bytes = proto.cpu_bytes();
  sample.link_bytes = proto.link_bytes();
  sample.resident_bytes = proto.resident_bytes();
  sample.cpu_busy_seconds = proto.cpu_busy_seconds();
  sample.link_busy_seconds = proto.link_busy_seconds();
  sample.both_busy_seconds = proto.both_busy_seconds();
  sample.dense_seconds = proto.dense_seconds();
  sample.device_attention_seconds = proto.device_attention_seconds();
  sample.cpu_bytes_both_busy = proto.cpu_bytes_both_busy();
  sample.link_bytes_both_busy = proto.link_bytes_both_busy();
  sample.observed_cpu_share = proto.observed_cpu_share();
  sample.planned_cpu_share = proto.planned_cpu_share();
  sample.share_generation = proto.share_generation();
  return sample;
}

ShareState FromProto(const v1::ShareState& proto) {
  ShareState state;
  state.generation = proto.generation();
  state.controller_id = proto.controller_id();
  for (const v1::ShareBucket& bucket_proto : proto.buckets()) {
    roofline::ShareBucket bucket;
    bucket.max_batch = bucket_proto.max_batch();
    for (const v1::SharePoint& point : bucket_proto.points()) {
      bucket.points.push_back({point.spilled_bytes(), point.cpu_share()});
    }
    state.table.buckets.push_back(std::move(bucket));
  }
  state.expires_in = FromProto(proto.expires_in());
  state.allowed = {proto.min_cpu_share(), proto.max_cpu_share()};
  state.last_cpu_share = proto.last_cpu_share();
  return state;
}

WorkerState FromProto(const v1::GetWorkerStateResponse& proto) {
  WorkerState state;
  state.worker_id = proto.worker_id();
  state.version = proto.version();
  state.model = proto.model();
  state.device = proto.device();
  state.start_time = absl::FromUnixSeconds(proto.start_time().seconds()) +
                     absl::Nanoseconds(proto.start_time().nanos());
  state.phase = proto.phase();
  state.running_requests = proto.running_requests();
  state.waiting_requests = proto.waiting_requests();
  for (const v1::RegionState& region : proto.regions()) {
    if (region.region() != v1::REGION_DEVICE) state.host_capacity_bytes += region.capacity_bytes();
  }
  state.steps_total = proto.steps_total();
  state.meet = proto.cut() == "meet";
  state.share = FromProto(proto.share());
  return state;
}

roofline::MachineProfile FromProto(const v1::MachineProfile& proto) {
  roofline::MachineProfile profile;
  profile.name = proto.name();
  profile.measured = proto.measured();
  profile.rates = {proto.cpu_alone(), proto.cpu_with_link(), proto.link_alone(),
                   proto.link_with_cpu(), proto.device()};
  profile.cpu_workers = static_cast<int>(std::min<uint32_t>(proto.cpu_workers(), 1 << 20));
  profile.handoff_per_layer_seconds = absl::ToDoubleSeconds(FromProto(proto.handoff_per_layer()));
  profile.num_layers = static_cast<int>(std::min<uint32_t>(proto.num_layers(), 1 << 20));
  profile.copy_overhead_seconds = absl::ToDoubleSeconds(FromProto(proto.copy_overhead()));
  profile.device_budget_bytes = static_cast<int64_t>(proto.device_budget_bytes());
  profile.host_budget_bytes = static_cast<int64_t>(proto.host_budget_bytes());
  return profile;
}

v1::SetCpuShareRequest ToProto(const ShareUpdate& update) {
  v1::SetCpuShareRequest proto;
  proto.set_controller_id(update.controller_id);
  proto.set_generation(update.generation);
  for (const roofline::ShareBucket& bucket : update.table.buckets) {
    v1::ShareBucket* bucket_proto = proto.add_buckets();
    bucket_proto->set_max_batch(bucket.max_batch);
    for (const roofline::SharePoint& point : bucket.points) {
      v1::SharePoint* point_proto = bucket_proto->add_points();
      point_proto->set_spilled_bytes(point.spilled_bytes);
      point_proto->set_cpu_share(point.share);
    }
  }
  ToProto(update.valid_for, proto.mutable_valid_for());
  proto.set_reason(update.reason);
  return proto;
}

std::shared_ptr<grpc::Channel> MakeChannel(const GrpcWorkerClientOptions& options) {
  const auto milliseconds = [](absl::Duration duration) {
    return static_cast<int>(absl::ToInt64Milliseconds(duration));
  };
  grpc::ChannelArguments args;
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, milliseconds(options.keepalive_interval));
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, milliseconds(options.keepalive_timeout));
  // The stream of an idle worker is silent for hours; gRPC would stop pinging after two pings.
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, milliseconds(options.min_backoff));
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, milliseconds(options.min_backoff));
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, milliseconds(options.max_backoff));
  return grpc::CreateCustomChannel(options.address, grpc::InsecureChannelCredentials(), args);
}

}  // namespace

class GrpcWorkerClient::Impl {
 public:
  explicit Impl(const GrpcWorkerClientOptions& options)
      : options_(options),
        channel_(MakeChannel(options)),
        stub_(v1::WorkerControlService::NewStub(channel_)),
        reader_([this] { ReadUntilStopped(); }) {}

  ~Impl() {
    Stop();
    reader_.join();
  }

  void Stop() {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
    if (stream_context_ != nullptr) stream_context_->TryCancel();
  }

  StepBatch TakeSteps(absl::Duration timeout) {
    absl::MutexLock lock(&mutex_);
    const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return stopped_ || !waiting_.empty();
    };
    mutex_.AwaitWithTimeout(absl::Condition(&ready), timeout);
    StepBatch batch;
    batch.stream = stream_;
    batch.connected = stream_context_ != nullptr;
    batch.dropped = std::exchange(dropped_, 0);
    batch.steps.assign(waiting_.begin(), waiting_.end());
    waiting_.clear();
    return batch;
  }

  template <typename Request, typename Response>
  absl::Status Call(grpc::Status (v1::WorkerControlService::Stub::*method)(grpc::ClientContext*,
                                                                           const Request&,
                                                                           Response*),
                    const Request& request, Response* response, const char* what) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         absl::ToChronoMilliseconds(options_.call_deadline));
    return FromGrpc((stub_.get()->*method)(&context, request, response), what);
  }

 private:
  bool stopped() const {
    absl::MutexLock lock(&mutex_);
    return stopped_;
  }

  // False once stopped.
  bool Sleep(absl::Duration duration) {
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(absl::Condition(&stopped_), duration);
    return !stopped_;
  }

  bool WaitForConnection() {
    absl::Time next_warning = Clock::Real().Now() + options_.warn_after;
    // Short waits, so that a stop is seen; the channel paces its own attempts.
    while (!stopped()) {
      if (channel_->WaitForConnected(std::chrono::system_clock::now() +
                                     std::chrono::milliseconds(100))) {
        return true;
      }
      if (Clock::Real().Now() < next_warning) continue;
      const grpc::Status why = TryCall();
      if (why.ok()) continue;
      Log(LogLevel::kWarning, "no worker answers",
          {{"address", options_.address}, {"error", why.error_message()}});
      next_warning += options_.between_warnings;
    }
    return false;
  }

  // Nobody there, or a name that nobody knows: only a call that fails says so.
  grpc::Status TryCall() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));
    v1::GetWorkerStateResponse response;
    return stub_->GetWorkerState(&context, v1::GetWorkerStateRequest(), &response);
  }

  void ReadUntilStopped() {
    absl::Duration backoff = options_.min_backoff;
    while (WaitForConnection()) {
      const bool got_steps = ReadOneStream();
      backoff = got_steps ? options_.min_backoff : std::min(backoff * 2, options_.max_backoff);
      if (!Sleep(backoff)) return;
    }
  }

  // From opening to end; whether a step came.
  bool ReadOneStream() {
    // Without a deadline: it lasts as long as the worker. Keepalive pings and Stop() end it.
    grpc::ClientContext context;
    {
      absl::MutexLock lock(&mutex_);
      if (stopped_) return false;
      stream_context_ = &context;
      ++stream_;
      waiting_.clear();
    }
    const auto reader = stub_->WatchSteps(&context, v1::WatchStepsRequest());
    v1::WatchStepsResponse response;
    bool got_steps = false;
    while (reader->Read(&response)) {
      got_steps = true;
      Enqueue(FromProto(response.step()), response.dropped());
    }
    {
      absl::MutexLock lock(&mutex_);
      stream_context_ = nullptr;
    }
    const grpc::Status status = FinishStream(*reader, context);
    if (!stopped()) LogEndOfStream(status, got_steps);
    return got_steps;
  }

  // A stream that brings nothing is opened again and again, and ends in the same way as a rule.
  void LogEndOfStream(const grpc::Status& status, bool got_steps) {
    const absl::Status end = FromGrpc(status, "WatchSteps");
    const absl::Time now = Clock::Real().Now();
    const bool repeats = !got_steps && end == logged_end_;
    if (repeats && now - logged_end_at_ < options_.between_warnings) return;
    logged_end_ = end;
    logged_end_at_ = now;
    if (absl::IsUnimplemented(end)) {
      Log(LogLevel::kWarning,
          "what answers has no steps to watch; --worker has to be a worker's --control-listen",
          {{"address", options_.address}});
    } else {
      Log(LogLevel::kInfo, "step stream ended",
          {{"address", options_.address},
           {"code", static_cast<int>(status.error_code())},
           {"message", status.error_message()}});
    }
  }

  void Enqueue(const StepSample& sample, uint64_t dropped) {
    absl::MutexLock lock(&mutex_);
    dropped_ += dropped;
    if (waiting_.size() >= options_.max_waiting_steps) {
      waiting_.pop_front();
      ++dropped_;
    }
    waiting_.push_back(sample);
  }

  const GrpcWorkerClientOptions options_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::WorkerControlService::Stub> stub_;

  mutable absl::Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  // Of the stream that is open; null between two.
  grpc::ClientContext* stream_context_ ABSL_GUARDED_BY(mutex_) = nullptr;
  uint64_t stream_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<StepSample> waiting_ ABSL_GUARDED_BY(mutex_);
  // Of the stream before, as far as it was logged. The reader's.
  std::optional<absl::Status> logged_end_;
  absl::Time logged_end_at_ = absl::InfinitePast();
  std::thread reader_;  // The last member: it uses all others.
};

GrpcWorkerClient::GrpcWorkerClient(const GrpcWorkerClientOptions& options)
    : impl_(std::make_unique<Impl>(options)) {}

GrpcWorkerClient::~GrpcWorkerClient() = default;

void GrpcWorkerClient::Stop() { impl_->Stop(); }

StepBatch GrpcWorkerClient::WatchSteps(absl::Duration timeout) { return impl_->TakeSteps(timeout); }

absl::StatusOr<WorkerState> GrpcWorkerClient::GetWorkerState() {
  v1::GetWorkerStateResponse response;
  const absl::Status status = impl_->Call(&v1::WorkerControlService::Stub::GetWorkerState,
                                          v1::GetWorkerStateRequest(), &response, "GetWorkerState");
  if (!status.ok()) return status;
  return FromProto(response);
}

absl::StatusOr<roofline::MachineProfile> GrpcWorkerClient::GetMachineProfile() {
  v1::GetMachineProfileResponse response;
  const absl::Status status =
      impl_->Call(&v1::WorkerControlService::Stub::GetMachineProfile,
                  v1::GetMachineProfileRequest(), &response, "GetMachineProfile");
  if (!status.ok()) return status;
  return FromProto(response.profile());
}

absl::StatusOr<ShareReply> GrpcWorkerClient::SetCpuShare(const ShareUpdate& update) {
  v1::SetCpuShareResponse response;
  const absl::Status status = impl_->Call(&v1::WorkerControlService::Stub::SetCpuShare,
                                          ToProto(update), &response, "SetCpuShare");
  if (!status.ok()) return status;
  ShareReply reply;
  reply.in_force = FromProto(response.in_force());
  switch (response.outcome()) {
    case v1::SHARE_OUTCOME_APPLIED:
      reply.outcome = ShareOutcome::kApplied;
      return reply;
    case v1::SHARE_OUTCOME_CLAMPED:
      reply.outcome = ShareOutcome::kClamped;
      return reply;
    case v1::SHARE_OUTCOME_STALE:
      reply.outcome = ShareOutcome::kStale;
      return reply;
    default:
      return absl::InternalError(absl::StrCat("SetCpuShare: the worker answered with outcome ",
                                              static_cast<int>(response.outcome())));
  }
}

}  // namespace writescope::controller
