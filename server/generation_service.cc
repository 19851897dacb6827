#include "server/generation_service.h"

#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/base/utf8.h"
#include "engine/runtime/error_reason.h"
#include "server/generation_convert.h"
#include "server/proto_numbers.h"
#include "server/raw_unary.h"
#include "server/status_mapping.h"
#include "server/wire.h"

namespace writescope::server {
namespace {

std::string NewRequestId() {
  static absl::Mutex mutex(absl::kConstInit);
  static std::mt19937_64 engine{std::random_device{}()};
  absl::MutexLock lock(&mutex);
  return absl::StrFormat("ws-%016x", static_cast<uint64_t>(engine()));
}

absl::Status TooManyWaiting() {
  return runtime::WithReason(absl::ResourceExhaustedError("too many requests wait to be read"),
                             "QUEUE_FULL");
}

// One Generate call: the stream to the client and the engine's sink.
class GenerateCall final : public QueuedStream, public runtime::GenerateSink {
 public:
  GenerateCall(grpc::CallbackServerContext* context, const grpc::ByteBuffer& request,
               const EngineSlot* slot, WorkerMetrics* metrics, StreamPump* pump,
               const GenerationServiceOptions& options, std::shared_ptr<std::atomic<int>> active)
      : QueuedStream(context, pump, options.stream),
        request_bytes_(request),
        slot_(slot),
        metrics_(metrics),
        active_(std::move(active)) {
    const auto deadline = context->deadline();
    if (deadline != std::chrono::system_clock::time_point::max()) {
      // By the engine's clock, which nobody sets.
      deadline_ = Clock::Real().Now() + (absl::FromChrono(deadline) - absl::Now());
    }
    active_->fetch_add(1);
  }
  ~GenerateCall() override { active_->fetch_sub(1); }

  // On the task pool: parse, convert, submit.
  void Admit() {
    const absl::Status status = TryAdmit();
    if (!status.ok()) {
      metrics_->CountRejection(runtime::ErrorReason(status));
      Over(status, /*forget_queue=*/true);
    }
  }
  void Refuse(const absl::Status& status) {
    metrics_->CountRejection(runtime::ErrorReason(status));
    Over(status, /*forget_queue=*/true);
  }

  // Engine thread.
  bool OnEvent(runtime::GenerateEvent event) override {
    std::string request_id;
    {
      absl::MutexLock lock(&mutex_);
      request_id = request_id_;
      usage_ = event.usage;
      if (event.finish.has_value()) finish_reason_ = FinishReasonName(event.finish->reason);
    }
    if (event.placement.has_value()) metrics_->CountPlacement(*event.placement);
    bool repaired = false;
    std::vector<std::unique_ptr<v1::GenerateResponse>> messages =
        ToProto(request_id, std::move(event), &repaired);
    if (repaired) {
      metrics_->CountRepairedText();
      Log(LogLevel::kError, "the engine's text was not whole UTF-8", {{"request_id", request_id}});
    }
    for (std::unique_ptr<v1::GenerateResponse>& message : messages) {
      if (!Push(std::move(message))) return false;
    }
    return true;
  }
  void OnDone(const absl::Status& status) override {
    // A failed request's client gets the reason at once; what it was too slow to read is no use.
    Over(status, /*forget_queue=*/absl::IsResourceExhausted(status));
  }

 private:
  absl::Status TryAdmit() {
    // The call ended before its message had come.
    if (!request_bytes_.Valid()) return GoneStatus();
    v1::GenerateRequest message;
    const absl::Status parsed = ParseMessage(request_bytes_, &message);
    request_bytes_.Clear();
    RETURN_IF_ERROR(parsed);
    const std::string request_id =
        message.request_id().empty() ? NewRequestId() : message.request_id();
    {
      absl::MutexLock lock(&mutex_);
      request_id_ = request_id;
    }
    ASSIGN_OR_RETURN(runtime::Engine* const engine, slot_->GetForNewWork());
    ASSIGN_OR_RETURN(runtime::GenerateRequest request, FromProto(message));
    message.Clear();
    request.request_id = request_id;
    request.deadline = deadline_;
    if (ended()) return GoneStatus();
    auto self = std::static_pointer_cast<GenerateCall>(shared_from_this());
    ASSIGN_OR_RETURN(const RequestId id, engine->Submit(std::move(request), std::move(self)));
    Commit();
    bool gone = false;
    {
      absl::MutexLock lock(&mutex_);
      submitted_ = {engine, id};
      gone = gone_;
    }
    Log(LogLevel::kInfo, "request accepted", {{"request_id", request_id}});
    if (gone) engine->Cancel(id);
    return absl::OkStatus();
  }

  void OnClientGone() override {
    std::optional<Submitted> submitted;
    {
      absl::MutexLock lock(&mutex_);
      gone_ = true;
      submitted = submitted_;
    }
    if (submitted.has_value()) submitted->engine->Cancel(submitted->id);
    Over(GoneStatus(), /*forget_queue=*/true);
  }

  // Why there is nobody to answer.
  absl::Status GoneStatus() const {
    if (Clock::Real().Now() >= deadline_) {
      return runtime::WithReason(absl::DeadlineExceededError("the request's deadline passed"),
                                 "DEADLINE_EXCEEDED");
    }
    return runtime::WithReason(absl::CancelledError("the client is gone"), "CANCELLED");
  }

  void Over(const absl::Status& status, bool forget_queue) {
    const grpc::Status final_status = ToGrpcStatus(status);
    if (!(forget_queue ? EndNow(final_status) : End(final_status))) return;
    std::string request_id;
    std::string reason;
    runtime::Usage usage;
    {
      absl::MutexLock lock(&mutex_);
      request_id = request_id_;
      reason = status.ok() ? finish_reason_ : "none";
      usage = usage_;
    }
    const std::string code = CodeName(final_status.error_code());
    metrics_->CountCall("Generate", reason, code);
    Log(status.ok() ? LogLevel::kInfo : LogLevel::kWarning, "request over",
        {{"request_id", request_id},
         {"code", code},
         {"reason", status.ok() ? reason : runtime::ErrorReason(status)},
         {"prompt_tokens", usage.prompt_tokens},
         {"cached_tokens", usage.cached_prompt_tokens},
         {"generated_tokens", usage.generated_tokens},
         {"seconds", absl::ToDoubleSeconds(Clock::Real().Now() - start_)},
         {"message", final_status.error_message()}});
  }

  grpc::ByteBuffer request_bytes_;
  const EngineSlot* const slot_;
  WorkerMetrics* const metrics_;
  const std::shared_ptr<std::atomic<int>> active_;
  absl::Time deadline_ = absl::InfiniteFuture();
  const absl::Time start_ = Clock::Real().Now();

  struct Submitted {
    runtime::Engine* engine;
    RequestId id;
  };
  absl::Mutex mutex_;
  std::string request_id_ ABSL_GUARDED_BY(mutex_);  // Empty until the request has been read.
  std::optional<Submitted> submitted_ ABSL_GUARDED_BY(mutex_);
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
  std::string finish_reason_ ABSL_GUARDED_BY(mutex_) = "none";
  runtime::Usage usage_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

grpc::ServerWriteReactor<grpc::ByteBuffer>* GenerationServiceImpl::Generate(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  auto call = std::make_shared<GenerateCall>(context, *request, slot_, metrics_, pump_, options_,
                                             active_calls_);
  call->HoldUntilDone();
  GenerateCall* const reactor = call.get();
  if (!pool_->Run(request->Length(), [call] { call->Admit(); })) call->Refuse(TooManyWaiting());
  return reactor;
}

grpc::ServerUnaryReactor* GenerationServiceImpl::Tokenize(grpc::CallbackServerContext* context,
                                                          const grpc::ByteBuffer* request,
                                                          grpc::ByteBuffer* response) {
  const auto handle = [this](const v1::TokenizeRequest& message,
                             v1::TokenizeResponse* reply) -> absl::Status {
    ASSIGN_OR_RETURN(const runtime::Engine* const engine, slot_->Get());
    std::vector<runtime::PromptSegment> segments;
    switch (message.input_case()) {
      case v1::TokenizeRequest::kText:
        segments = {{.text = message.text(), .allow_special = false}};
        break;
      case v1::TokenizeRequest::kSegmented:
        segments = FromProto(message.segmented());
        break;
      case v1::TokenizeRequest::INPUT_NOT_SET:
        return InvalidField("input", "one of text and segmented has to be set", "EMPTY_PROMPT");
    }
    std::optional<bool> add_bos;
    if (message.has_add_bos()) add_bos = message.add_bos();
    ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, engine->Tokenize(segments, add_bos));
    for (const TokenId token : tokens) {
      reply->add_token_ids(static_cast<uint32_t>(token));
      reply->add_token_bytes(engine->TokenBytes(token));
    }
    return absl::OkStatus();
  };
  return AnswerUnary<v1::TokenizeRequest, v1::TokenizeResponse>(context, request, response, pool_,
                                                                handle);
}

grpc::ServerUnaryReactor* GenerationServiceImpl::Detokenize(grpc::CallbackServerContext* context,
                                                            const grpc::ByteBuffer* request,
                                                            grpc::ByteBuffer* response) {
  const auto handle = [this](const v1::DetokenizeRequest& message,
                             v1::DetokenizeResponse* reply) -> absl::Status {
    ASSIGN_OR_RETURN(const runtime::Engine* const engine, slot_->Get());
    ASSIGN_OR_RETURN(const std::vector<TokenId> ids, ToTokenIds(message.token_ids(), "token_ids"));
    ASSIGN_OR_RETURN(const std::string text,
                     engine->Detokenize(ids, message.keep_special_tokens()));
    reply->set_text(IsWholeUtf8(text) ? text : RepairUtf8(text));
    return absl::OkStatus();
  };
  return AnswerUnary<v1::DetokenizeRequest, v1::DetokenizeResponse>(context, request, response,
                                                                    pool_, handle);
}

grpc::ServerUnaryReactor* GenerationServiceImpl::GetModelInfo(grpc::CallbackServerContext* context,
                                                              const grpc::ByteBuffer* request,
                                                              grpc::ByteBuffer* response) {
  const auto handle = [this](const v1::GetModelInfoRequest&,
                             v1::GetModelInfoResponse* reply) -> absl::Status {
    ASSIGN_OR_RETURN(const runtime::Engine* const engine, slot_->Get());
    *reply = ToProto(engine->model(), options_.max_request_bytes);
    reply->set_version(options_.version);
    return absl::OkStatus();
  };
  return AnswerUnary<v1::GetModelInfoRequest, v1::GetModelInfoResponse>(context, request, response,
                                                                        nullptr, handle);
}

grpc::ServerUnaryReactor* GenerationServiceImpl::Abort(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request,
                                                       grpc::ByteBuffer* response) {
  const auto handle = [this](const v1::AbortRequest& message,
                             v1::AbortResponse* reply) -> absl::Status {
    ASSIGN_OR_RETURN(runtime::Engine* const engine, slot_->Get());
    reply->set_found(engine->Abort(message.request_id()));
    Log(LogLevel::kInfo, "abort asked for",
        {{"request_id", message.request_id()}, {"found", reply->found()}});
    return absl::OkStatus();
  };
  return AnswerUnary<v1::AbortRequest, v1::AbortResponse>(context, request, response, nullptr,
                                                          handle);
}

}  // namespace writescope::server
