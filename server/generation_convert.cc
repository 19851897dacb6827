#include "server/generation_convert.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "engine/base/utf8.h"
#include "server/proto_numbers.h"
#include "server/time_convert.h"

namespace writescope::server {
namespace {

constexpr uint32_t kMaxInt = std::numeric_limits<int32_t>::max();
// Keeps a message with 20 alternatives a position well below a client's default limit of 4 MiB.
constexpr size_t kPromptLogprobsPerMessage = 512;

absl::Status CheckedInt(std::string_view field, uint32_t value, int* result) {
  if (value > kMaxInt) {
    return InvalidField(field, absl::StrCat(value, " is above ", kMaxInt), "INVALID_PARAMETER");
  }
  *result = static_cast<int>(value);
  return absl::OkStatus();
}

absl::Status ConvertSampling(const v1::SamplingParams& proto, runtime::SamplingParams* sampling) {
  if (proto.has_temperature()) sampling->temperature = proto.temperature();
  if (proto.has_top_k()) {
    RETURN_IF_ERROR(CheckedInt("sampling.top_k", proto.top_k(), &sampling->top_k));
  }
  if (proto.has_top_p()) sampling->top_p = proto.top_p();
  if (proto.has_min_p()) sampling->min_p = proto.min_p();
  if (proto.has_seed()) sampling->seed = proto.seed();
  if (proto.has_repetition_penalty()) sampling->repetition_penalty = proto.repetition_penalty();
  if (proto.has_presence_penalty()) sampling->presence_penalty = proto.presence_penalty();
  if (proto.has_frequency_penalty()) sampling->frequency_penalty = proto.frequency_penalty();
  return absl::OkStatus();
}

absl::Status ConvertStopping(const v1::StoppingParams& proto, runtime::StoppingParams* stopping) {
  if (proto.has_max_tokens()) stopping->max_tokens = proto.max_tokens();
  stopping->min_tokens = proto.min_tokens();
  stopping->stop.assign(proto.stop().begin(), proto.stop().end());
  ASSIGN_OR_RETURN(stopping->stop_token_ids,
                   ToTokenIds(proto.stop_token_ids(), "stopping.stop_token_ids"));
  stopping->ignore_eos = proto.ignore_eos();
  return absl::OkStatus();
}

absl::Status ConvertPrompt(const v1::GenerateRequest& proto, runtime::Prompt* prompt) {
  switch (proto.prompt_case()) {
    case v1::GenerateRequest::kText: {
      *prompt = std::vector<runtime::PromptSegment>{{.text = proto.text(), .allow_special = false}};
      return absl::OkStatus();
    }
    case v1::GenerateRequest::kTokenIds: {
      ASSIGN_OR_RETURN(*prompt, ToTokenIds(proto.token_ids().ids(), "token_ids.ids"));
      return absl::OkStatus();
    }
    case v1::GenerateRequest::kSegmented: {
      *prompt = FromProto(proto.segmented());
      return absl::OkStatus();
    }
    case v1::GenerateRequest::PROMPT_NOT_SET:
      break;
  }
  return InvalidField("prompt", "one of text, token_ids and segmented has to be set",
                      "EMPTY_PROMPT");
}

void ConvertLogprob(const runtime::TokenLogprob& logprob, v1::TokenLogprob* proto) {
  proto->set_token_id(static_cast<uint32_t>(logprob.token));
  proto->set_logprob(logprob.logprob);
  proto->set_rank(static_cast<uint32_t>(std::max(logprob.rank, 0)));
}

void ConvertPosition(const runtime::PositionLogprobs& position, v1::PositionLogprobs* proto) {
  if (position.token.has_value()) ConvertLogprob(*position.token, proto->mutable_token());
  for (const runtime::TokenLogprob& top : position.top) ConvertLogprob(top, proto->add_top());
}

v1::FinishReason ToProto(runtime::FinishReason reason) {
  switch (reason) {
    case runtime::FinishReason::kMaxTokens:
      return v1::FINISH_REASON_MAX_TOKENS;
    case runtime::FinishReason::kContextFull:
      return v1::FINISH_REASON_CONTEXT_FULL;
    case runtime::FinishReason::kEosToken:
      return v1::FINISH_REASON_EOS_TOKEN;
    case runtime::FinishReason::kStopToken:
      return v1::FINISH_REASON_STOP_TOKEN;
    case runtime::FinishReason::kStopString:
      return v1::FINISH_REASON_STOP_STRING;
    case runtime::FinishReason::kAborted:
      return v1::FINISH_REASON_ABORTED;
    case runtime::FinishReason::kTimeLimit:
      return v1::FINISH_REASON_TIME_LIMIT;
  }
  return v1::FINISH_REASON_UNSPECIFIED;
}

std::string Repaired(std::string text, bool* repaired) {
  if (IsWholeUtf8(text)) return text;
  *repaired = true;
  return RepairUtf8(text);
}

void ConvertUsage(const runtime::Usage& usage, v1::Usage* proto) {
  proto->set_prompt_tokens(ToUint32(usage.prompt_tokens));
  proto->set_cached_prompt_tokens(ToUint32(usage.cached_prompt_tokens));
  proto->set_generated_tokens(ToUint32(usage.generated_tokens));
}

void ConvertProgress(const runtime::PromptProgress& progress, v1::PromptProgress* proto) {
  proto->set_tokens_done(ToUint32(progress.tokens_done));
  proto->set_tokens_total(ToUint32(progress.tokens_total));
  proto->set_tokens_cached(ToUint32(progress.tokens_cached));
  proto->set_queue_position(ToUint32(progress.queue_position));
  if (progress.estimated_time_left.has_value()) {
    *proto->mutable_estimated_time_left() = server::ToProto(*progress.estimated_time_left);
  }
}

void ConvertFinish(const runtime::Finish& finish, v1::Finish* proto, bool* repaired) {
  proto->set_reason(ToProto(finish.reason));
  if (finish.matched_token.has_value()) {
    proto->set_token_id(static_cast<uint32_t>(*finish.matched_token));
  } else if (!finish.matched_stop.empty()) {
    proto->set_stop_string(Repaired(finish.matched_stop, repaired));
  }
}

void ConvertPlacement(const runtime::PlacementReport& report, v1::PlacementReport* proto) {
  proto->set_gpu_resident_tokens(ToUint64(report.gpu_resident_tokens));
  proto->set_gpu_streamed_tokens(ToUint64(report.gpu_streamed_tokens));
  proto->set_cpu_tokens(ToUint64(report.cpu_tokens));
  proto->set_streamed_bytes(ToUint64(report.streamed_bytes));
  proto->set_last_cpu_share(static_cast<float>(report.last_cpu_share));
  proto->set_mean_cpu_share(static_cast<float>(report.mean_cpu_share));
  proto->set_device_bytes(ToUint64(report.device_bytes));
  proto->set_stream_bytes(ToUint64(report.stream_bytes));
  proto->set_swing_bytes(ToUint64(report.swing_bytes));
  proto->set_host_bytes(ToUint64(report.host_bytes));
  proto->set_steps(ToUint64(report.steps));
}

}  // namespace

const char* FinishReasonName(runtime::FinishReason reason) {
  switch (reason) {
    case runtime::FinishReason::kMaxTokens:
      return "max_tokens";
    case runtime::FinishReason::kContextFull:
      return "context_full";
    case runtime::FinishReason::kEosToken:
      return "eos_token";
    case runtime::FinishReason::kStopToken:
      return "stop_token";
    case runtime::FinishReason::kStopString:
      return "stop_string";
    case runtime::FinishReason::kAborted:
      return "aborted";
    case runtime::FinishReason::kTimeLimit:
      return "time_limit";
  }
  return "unknown";
}

std::vector<runtime::PromptSegment> FromProto(const v1::SegmentedPrompt& proto) {
  std::vector<runtime::PromptSegment> segments;
  segments.reserve(static_cast<size_t>(proto.segments_size()));
  for (const v1::PromptSegment& segment : proto.segments()) {
    segments.push_back({.text = segment.text(), .allow_special = segment.allow_special()});
  }
  return segments;
}

absl::StatusOr<std::vector<TokenId>> ToTokenIds(
    const google::protobuf::RepeatedField<uint32_t>& ids, std::string_view field) {
  std::vector<TokenId> tokens;
  tokens.reserve(static_cast<size_t>(ids.size()));
  for (int i = 0; i < ids.size(); ++i) {
    if (ids[i] > kMaxInt) {
      return InvalidField(field,
                          absl::StrCat("id ", ids[i], " at position ", i, " is above ", kMaxInt),
                          "INVALID_TOKEN_ID");
    }
    tokens.push_back(static_cast<TokenId>(ids[i]));
  }
  return tokens;
}

absl::StatusOr<runtime::GenerateRequest> FromProto(const v1::GenerateRequest& proto) {
  runtime::GenerateRequest request;
  if (proto.request_id().size() > kMaxRequestIdBytes) {
    return InvalidField(
        "request_id",
        absl::StrCat(proto.request_id().size(), " bytes, at most ", kMaxRequestIdBytes),
        "INVALID_PARAMETER");
  }
  request.request_id = proto.request_id();
  RETURN_IF_ERROR(ConvertPrompt(proto, &request.prompt));
  if (proto.has_add_bos()) request.add_bos = proto.add_bos();
  RETURN_IF_ERROR(ConvertSampling(proto.sampling(), &request.sampling));
  RETURN_IF_ERROR(ConvertStopping(proto.stopping(), &request.stopping));
  if (proto.logprobs().has_logprobs()) {
    RETURN_IF_ERROR(
        CheckedInt("logprobs.logprobs", proto.logprobs().logprobs(), &request.logprobs.emplace()));
  }
  if (proto.logprobs().has_prompt_logprobs()) {
    RETURN_IF_ERROR(CheckedInt("logprobs.prompt_logprobs", proto.logprobs().prompt_logprobs(),
                               &request.prompt_logprobs.emplace()));
  }
  request.keep_special_tokens = proto.keep_special_tokens();
  return request;
}

std::vector<std::unique_ptr<v1::GenerateResponse>> ToProto(const std::string& request_id,
                                                           runtime::GenerateEvent event,
                                                           bool* repaired) {
  std::vector<std::unique_ptr<v1::GenerateResponse>> messages;
  const auto add = [&] {
    messages.push_back(std::make_unique<v1::GenerateResponse>());
    messages.back()->set_request_id(request_id);
    ConvertUsage(event.usage, messages.back()->mutable_usage());
    return messages.back().get();
  };
  v1::GenerateResponse* message = add();
  for (size_t i = 0; i < event.prompt_logprobs.size(); ++i) {
    if (i > 0 && i % kPromptLogprobsPerMessage == 0) message = add();
    ConvertPosition(event.prompt_logprobs[i], message->add_prompt_logprobs());
  }
  message->set_text(Repaired(std::move(event.text), repaired));
  for (const TokenId token : event.tokens) message->add_token_ids(static_cast<uint32_t>(token));
  for (const runtime::PositionLogprobs& position : event.logprobs) {
    ConvertPosition(position, message->add_logprobs());
  }
  if (event.progress.has_value()) ConvertProgress(*event.progress, message->mutable_progress());
  if (event.finish.has_value()) ConvertFinish(*event.finish, message->mutable_finish(), repaired);
  if (event.placement.has_value()) ConvertPlacement(*event.placement, message->mutable_placement());
  return messages;
}

v1::GetModelInfoResponse ToProto(const runtime::ModelInfo& info, uint64_t max_request_bytes) {
  v1::GetModelInfoResponse proto;
  proto.set_model(RepairUtf8(info.name));
  proto.set_architecture(RepairUtf8(info.architecture));
  proto.set_vocab_size(ToUint32(info.vocab_size));
  proto.set_num_layers(ToUint32(info.num_layers));
  proto.set_kv_dtype(info.kv_dtype);
  proto.set_weight_dtype(info.weight_dtype);
  proto.set_kv_bytes_per_token(ToUint64(info.kv_bytes_per_token));
  if (info.bos_token.has_value()) proto.set_bos_token_id(static_cast<uint32_t>(*info.bos_token));
  for (const TokenId eos : info.eos_tokens) proto.add_eos_token_ids(static_cast<uint32_t>(eos));
  proto.set_has_tokenizer(info.has_tokenizer);
  proto.set_chat_template(RepairUtf8(info.chat_template));
  proto.set_device(info.device);
  v1::ModelLimits& limits = *proto.mutable_limits();
  limits.set_max_context_tokens(ToUint32(info.max_context_tokens));
  limits.set_max_resident_context_tokens(ToUint32(info.max_resident_context_tokens));
  limits.set_max_sequences(ToUint32(info.max_sequences));
  limits.set_max_queue(ToUint32(info.max_queue));
  limits.set_max_stop_strings(runtime::kMaxStopStrings);
  limits.set_max_stop_string_bytes(runtime::kMaxStopStringBytes);
  limits.set_max_logprobs(runtime::kMaxLogprobs);
  limits.set_max_request_bytes(max_request_bytes);
  return proto;
}

}  // namespace writescope::server
