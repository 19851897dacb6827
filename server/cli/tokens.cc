#include "server/cli/tokens.h"

#include <cstdio>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_join.h"
#include "engine/base/utf8.h"
#include "server/cli/generate.h"
#include "server/parse_units.h"
#include "writescope/v1/generation.grpc.pb.h"

namespace writescope::cli {
namespace {

std::unique_ptr<v1::GenerationService::Stub> NewStub(const ClientOptions& client) {
  return v1::GenerationService::NewStub(Connect(client.address));
}

}  // namespace

int RunTokenize(const ClientOptions& client, const TokenizeFlags& flags) {
  std::string text = flags.text;
  if (!flags.file.empty() || text.empty() || text == "-") {
    absl::StatusOr<std::string> read = ReadText(flags.file.empty() ? "-" : flags.file);
    if (!read.ok()) return ReportLocalError(std::string(read.status().message()));
    text = *std::move(read);
  }
  if (!IsWholeUtf8(text)) return ReportLocalError("the text is not valid UTF-8");
  v1::TokenizeRequest request;
  v1::PromptSegment* segment = request.mutable_segmented()->add_segments();
  segment->set_text(text);
  segment->set_allow_special(flags.allow_special);
  if (flags.no_bos) request.set_add_bos(false);
  v1::TokenizeResponse response;
  grpc::ClientContext context;
  SetDeadline(context, client.timeout_span);
  const grpc::Status status = NewStub(client)->Tokenize(&context, request, &response);
  if (!status.ok()) return ReportError(status, client.address);
  if (!flags.pieces) {
    std::printf("%s\n", absl::StrJoin(response.token_ids(), " ").c_str());
    return kExitOk;
  }
  for (int i = 0; i < response.token_ids_size(); ++i) {
    const std::string& bytes = response.token_bytes(i);
    // A piece of a character is shown byte by byte.
    const std::string shown =
        IsWholeUtf8(bytes) ? absl::Utf8SafeCEscape(bytes) : absl::CEscape(bytes);
    std::printf("%u\t\"%s\"\n", response.token_ids(i), shown.c_str());
  }
  return kExitOk;
}

int RunDetokenize(const ClientOptions& client, const std::string& ids, bool keep_special) {
  std::string text = ids;
  if (text.empty() || text == "-") {
    absl::StatusOr<std::string> read = ReadText("-");
    if (!read.ok()) return ReportLocalError(std::string(read.status().message()));
    text = *std::move(read);
  }
  const absl::StatusOr<std::vector<uint32_t>> parsed = ParseTokenIds(text);
  if (!parsed.ok()) return ReportLocalError(std::string(parsed.status().message()));
  v1::DetokenizeRequest request;
  request.mutable_token_ids()->Assign(parsed->begin(), parsed->end());
  if (keep_special) request.set_keep_special_tokens(true);
  v1::DetokenizeResponse response;
  grpc::ClientContext context;
  SetDeadline(context, client.timeout_span);
  const grpc::Status status = NewStub(client)->Detokenize(&context, request, &response);
  if (!status.ok()) return ReportError(status, client.address);
  std::printf("%s\n", response.text().c_str());
  return kExitOk;
}

int RunInfo(const ClientOptions& client) {
  v1::GetModelInfoResponse info;
  grpc::ClientContext context;
  SetDeadline(context, client.timeout_span);
  const grpc::Status status = NewStub(client)->GetModelInfo(&context, {}, &info);
  if (!status.ok()) return ReportError(status, client.address);
  const v1::ModelLimits& limits = info.limits();
  std::printf("model      %s (%s), %u layers, vocabulary of %u\n", info.model().c_str(),
              info.architecture().c_str(), info.num_layers(), info.vocab_size());
  std::printf("served     on %s, weights %s, kv %s, %s of kv a token, version %s\n",
              info.device().c_str(), info.weight_dtype().c_str(), info.kv_dtype().c_str(),
              server::FormatByteSize(static_cast<double>(info.kv_bytes_per_token())).c_str(),
              info.version().c_str());
  std::printf("tokenizer  %s, chat template %s\n", info.has_tokenizer() ? "yes" : "no",
              info.chat_template().empty() ? "no" : "yes");
  std::printf("context    %u tokens, %u of them without spilling\n", limits.max_context_tokens(),
              limits.max_resident_context_tokens());
  std::printf("limits     %u sequences, queue of %u, %u stop strings of %u bytes, %u logprobs\n",
              limits.max_sequences(), limits.max_queue(), limits.max_stop_strings(),
              limits.max_stop_string_bytes(), limits.max_logprobs());
  return kExitOk;
}

int RunAbort(const ClientOptions& client, const std::string& request_id) {
  v1::AbortRequest request;
  request.set_request_id(request_id);
  v1::AbortResponse response;
  grpc::ClientContext context;
  SetDeadline(context, client.timeout_span);
  const grpc::Status status = NewStub(client)->Abort(&context, request, &response);
  if (!status.ok()) return ReportError(status, client.address);
  if (!response.found()) {
    std::fprintf(stderr, "no request '%s' is in flight\n", request_id.c_str());
    return kExitRefused;
  }
  std::printf("aborted\n");
  return kExitOk;
}

}  // namespace writescope::cli
