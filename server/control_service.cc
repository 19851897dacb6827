#include "server/control_service.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/base/utf8.h"
#include "engine/runtime/error_reason.h"
#include "server/config.h"
#include "server/control_convert.h"
#include "server/proto_numbers.h"
#include "server/raw_unary.h"
#include "server/status_mapping.h"
#include "server/time_convert.h"

namespace writescope::server {
namespace {

// That say the same.
constexpr absl::Duration kBetweenWarnings = absl::Minutes(1);

class WatchCall final : public QueuedStream {
 public:
  WatchCall(grpc::CallbackServerContext* context, StreamPump* pump, StreamLimits limits,
            WorkerMetrics* metrics)
      : QueuedStream(context, pump, limits), metrics_(metrics) {}

 private:
  void OnClientGone() override {}
  void SetDropped(Message& message, uint64_t dropped) override {
    static_cast<v1::WatchStepsResponse&>(message).set_dropped(dropped);
    metrics_->CountDroppedTelemetry(dropped);
  }

  WorkerMetrics* const metrics_;
};

const char* CutName(runtime::CutMode cut) {
  return cut == runtime::CutMode::kPlanned ? "planned" : "meet";
}

}  // namespace

void ControlServiceImpl::PublishStep(const runtime::StepStats& stats) {
  absl::MutexLock lock(&mutex_);
  if (watchers_.empty()) return;
  v1::WatchStepsResponse message;
  ToProto(stats, message.mutable_step());
  std::erase_if(watchers_, [&](const std::weak_ptr<QueuedStream>& weak) {
    const std::shared_ptr<QueuedStream> watcher = weak.lock();
    if (watcher == nullptr || watcher->ended()) return true;
    watcher->PushDroppingOldest(std::make_unique<v1::WatchStepsResponse>(message));
    return false;
  });
}

void ControlServiceImpl::CloseWatchers() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  for (const std::weak_ptr<QueuedStream>& weak : watchers_) {
    if (const std::shared_ptr<QueuedStream> watcher = weak.lock()) {
      watcher->End(ToGrpcStatus(
          runtime::WithReason(absl::UnavailableError("the worker is shutting down"), "DRAINING")));
    }
  }
  watchers_.clear();
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* ControlServiceImpl::WatchSteps(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  StreamLimits limits;
  limits.max_queued_messages = options_.watch_buffer_steps;
  limits.max_stall = absl::Seconds(1);
  auto call = std::make_shared<WatchCall>(context, pump_, limits, metrics_);
  call->HoldUntilDone();
  v1::WatchStepsRequest message;
  absl::Status status = ParseMessage(*request, &message);
  {
    absl::MutexLock lock(&mutex_);
    std::erase_if(watchers_, [](const std::weak_ptr<QueuedStream>& weak) {
      const std::shared_ptr<QueuedStream> watcher = weak.lock();
      return watcher == nullptr || watcher->ended();
    });
    if (status.ok() && closed_) {
      status =
          runtime::WithReason(absl::UnavailableError("the worker is shutting down"), "DRAINING");
    } else if (status.ok() && watchers_.size() >= options_.max_watchers) {
      status = runtime::WithReason(
          absl::ResourceExhaustedError(
              absl::StrCat("there are ", watchers_.size(), " watchers already, the most allowed")),
          "TOO_MANY_WATCHERS");
    }
    if (status.ok()) watchers_.push_back(call);
  }
  WatchCall* const reactor = call.get();
  if (status.ok()) {
    call->Commit();  // The client knows that it will see every step from now on.
  } else {
    call->EndNow(ToGrpcStatus(status));
  }
  return reactor;
}

grpc::ServerUnaryReactor* ControlServiceImpl::SetCpuShare(grpc::CallbackServerContext* context,
                                                          const grpc::ByteBuffer* request,
                                                          grpc::ByteBuffer* response) {
  const auto handle = [this](const v1::SetCpuShareRequest& message,
                             v1::SetCpuShareResponse* reply) -> absl::Status {
    ASSIGN_OR_RETURN(runtime::Engine* const engine, slot_->Get());
    absl::StatusOr<runtime::ShareReply> answer = [&]() -> absl::StatusOr<runtime::ShareReply> {
      ASSIGN_OR_RETURN(const runtime::ShareUpdate update, FromProto(message));
      return engine->SetCpuShare(update);
    }();
    if (!answer.ok()) {
      metrics_->CountShareUpdate("invalid");
      if (IsNews(answer.status())) {
        Log(LogLevel::kWarning, "share table refused",
            {{"controller_id", message.controller_id()},
             {"generation", message.generation()},
             {"message", answer.status().message()}});
      }
      if (runtime::ErrorReason(answer.status()).empty() &&
          absl::IsInvalidArgument(answer.status())) {
        return runtime::WithReason(answer.status(), "INVALID_PARAMETER");
      }
      return answer.status();
    }
    metrics_->CountShareUpdate(OutcomeName(answer->outcome));
    Log(LogLevel::kDebug, "share table",
        {{"controller_id", message.controller_id()},
         {"generation", message.generation()},
         {"outcome", OutcomeName(answer->outcome)},
         {"reason", message.reason()}});
    reply->set_outcome(ToProto(answer->outcome));
    ToProto(answer->in_force, reply->mutable_in_force());
    return absl::OkStatus();
  };
  return AnswerUnary<v1::SetCpuShareRequest, v1::SetCpuShareResponse>(context, request, response,
                                                                      nullptr, handle);
}

bool ControlServiceImpl::IsNews(const absl::Status& refusal) {
  const absl::Time now = Clock::Real().Now();
  absl::MutexLock lock(&mutex_);
  if (refusal == logged_refusal_ && now - logged_refusal_at_ < kBetweenWarnings) return false;
  logged_refusal_ = refusal;
  logged_refusal_at_ = now;
  return true;
}

void ControlServiceImpl::FillState(const runtime::Engine* engine,
                                   v1::GetWorkerStateResponse* reply) const {
  reply->set_worker_id(options_.worker_id);
  reply->set_version(options_.version);
  *reply->mutable_start_time() = ToProto(start_time_);
  reply->set_phase(PhaseName(slot_->phase()));
  if (engine == nullptr) return;
  const runtime::EngineState state = engine->state();
  reply->set_model(RepairUtf8(engine->model().name));
  reply->set_device(engine->model().device);
  reply->set_running_requests(static_cast<uint32_t>(state.running_requests));
  reply->set_waiting_requests(static_cast<uint32_t>(state.waiting_requests));
  for (const runtime::RegionState& region : state.regions) ToProto(region, reply->add_regions());
  ToProto(engine->share(), reply->mutable_share());
  reply->set_moved_bytes_total(static_cast<uint64_t>(state.moved_bytes_total));
  reply->set_steps_total(static_cast<uint64_t>(state.steps_total));
  if (state.last_decode_step.has_value()) {
    ToProto(*state.last_decode_step, reply->mutable_last_decode_step());
  }
  reply->set_cut(CutName(state.cut));
  reply->set_cpu_workers(static_cast<uint32_t>(state.cpu_workers));
  reply->set_link_simulated(state.link_simulated);
  reply->set_link_pace_bytes_per_second(state.link_pace_bytes_per_s);
  reply->set_prefix_hit_tokens_total(static_cast<uint64_t>(state.prefix_hit_tokens_device_total +
                                                           state.prefix_hit_tokens_host_total));
  reply->set_prefix_query_tokens_total(static_cast<uint64_t>(state.prefix_query_tokens_total));
}

grpc::ServerUnaryReactor* ControlServiceImpl::GetWorkerState(grpc::CallbackServerContext* context,
                                                             const grpc::ByteBuffer* request,
                                                             grpc::ByteBuffer* response) {
  const auto handle = [this](const v1::GetWorkerStateRequest&,
                             v1::GetWorkerStateResponse* reply) -> absl::Status {
    FillState(slot_->engine(), reply);
    return absl::OkStatus();
  };
  return AnswerUnary<v1::GetWorkerStateRequest, v1::GetWorkerStateResponse>(
      context, request, response, nullptr, handle);
}

grpc::ServerUnaryReactor* ControlServiceImpl::GetMachineProfile(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
    grpc::ByteBuffer* response) {
  const auto handle = [this](const v1::GetMachineProfileRequest&,
                             v1::GetMachineProfileResponse* reply) -> absl::Status {
    ASSIGN_OR_RETURN(const runtime::Engine* const engine, slot_->Get());
    ToProto(engine->machine_profile(), reply->mutable_profile());
    return absl::OkStatus();
  };
  return AnswerUnary<v1::GetMachineProfileRequest, v1::GetMachineProfileResponse>(
      context, request, response, nullptr, handle);
}

grpc::ServerUnaryReactor* ControlServiceImpl::SetLinkPace(grpc::CallbackServerContext* context,
                                                          const grpc::ByteBuffer* request,
                                                          grpc::ByteBuffer* response) {
  const auto handle = [this](const v1::SetLinkPaceRequest& message,
                             v1::SetLinkPaceResponse* reply) -> absl::Status {
    ASSIGN_OR_RETURN(runtime::Engine* const engine, slot_->Get());
    const double pace = message.bytes_per_second();
    if (pace != 0 && !(std::isfinite(pace) && pace >= kMinLinkBytesPerS)) {
      return InvalidField("bytes_per_second",
                          absl::StrCat(pace, " is neither 0, no pace, nor a finite number of ",
                                       kMinLinkBytesPerS, " or more"));
    }
    reply->set_previous_bytes_per_second(engine->state().link_pace_bytes_per_s);
    RETURN_IF_ERROR(engine->SetLinkPace(pace));
    Log(LogLevel::kInfo, "link pace set", {{"bytes_per_s", pace}});
    return absl::OkStatus();
  };
  return AnswerUnary<v1::SetLinkPaceRequest, v1::SetLinkPaceResponse>(context, request, response,
                                                                      nullptr, handle);
}

}  // namespace writescope::server
