#include "server/cli/streaming.h"

#include <cstdio>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "server/cli/terminal.h"
#include "server/parse_units.h"
#include "server/time_convert.h"
#include "writescope/v1/generation.grpc.pb.h"

namespace writescope::cli {
namespace {

using server::FormatByteSize;

void ShowProgress(const v1::PromptProgress& progress, ProgressLine* line) {
  if (progress.queue_position() > 0) {
    line->Show(0, absl::StrCat("waiting, place ", progress.queue_position(), " in the queue"));
    return;
  }
  const double total = progress.tokens_total();
  const double fraction = total > 0 ? progress.tokens_done() / total : 0;
  std::string text = absl::StrCat("reading the prompt: ", progress.tokens_done(), " of ",
                                  progress.tokens_total(), " tokens");
  if (progress.tokens_cached() > 0)
    absl::StrAppend(&text, ", ", progress.tokens_cached(), " cached");
  if (progress.has_estimated_time_left()) {
    absl::StrAppend(&text, ", ", FormatSpan(server::FromProto(progress.estimated_time_left())),
                    " left");
  }
  line->Show(fraction, text);
}

std::string FinishText(const v1::Finish& finish) {
  std::string text(absl::StripPrefix(v1::FinishReason_Name(finish.reason()), "FINISH_REASON_"));
  absl::AsciiStrToLower(&text);
  if (finish.matched_case() == v1::Finish::kTokenId) {
    absl::StrAppend(&text, " (token ", finish.token_id(), ")");
  } else if (finish.matched_case() == v1::Finish::kStopString) {
    absl::StrAppend(&text, " ('", finish.stop_string(), "')");
  }
  return text;
}

void PrintLogprobs(const v1::GenerateResponse& message) {
  for (int i = 0; i < message.logprobs_size(); ++i) {
    const v1::PositionLogprobs& position = message.logprobs(i);
    std::fprintf(stderr, "token %u logprob %.4f rank %u;", position.token().token_id(),
                 position.token().logprob(), position.token().rank());
    for (const v1::TokenLogprob& top : position.top()) {
      std::fprintf(stderr, " %u:%.4f", top.token_id(), top.logprob());
    }
    std::fputc('\n', stderr);
  }
}

void PrintAnswer(const v1::GenerateResponse& message, const StreamingOptions& options) {
  if (options.print_token_ids) {
    for (const uint32_t id : message.token_ids()) std::printf("%u ", id);
  } else {
    std::fwrite(message.text().data(), 1, message.text().size(), stdout);
  }
  std::fflush(stdout);
}

}  // namespace

std::string FormatReport(const v1::PlacementReport& placement, const v1::Usage& usage,
                         const v1::Finish& finish) {
  const double resident = static_cast<double>(placement.gpu_resident_tokens());
  const double streamed = static_cast<double>(placement.gpu_streamed_tokens());
  const double cpu = static_cast<double>(placement.cpu_tokens());
  const double all = resident + streamed + cpu;
  const double bytes = static_cast<double>(placement.device_bytes() + placement.stream_bytes() +
                                           placement.swing_bytes() + placement.host_bytes());
  const double spilled = bytes - static_cast<double>(placement.device_bytes());
  const auto part = [](double a, double b) { return FormatPercent(b > 0 ? a / b : 0); };
  std::string text = absl::StrFormat("finished: %s; %d prompt tokens (%d cached), %d generated\n",
                                     FinishText(finish), usage.prompt_tokens(),
                                     usage.cached_prompt_tokens(), usage.generated_tokens());
  absl::StrAppendFormat(
      &text, "attended: gpu resident %s %.0f, gpu streamed %s %.0f, cpu %s %.0f tokens\n",
      part(resident, all), resident, part(streamed, all), streamed, part(cpu, all), cpu);
  absl::StrAppendFormat(&text, "cpu share of spilled bytes: mean %.3f, last %.3f; streamed %s\n",
                        placement.mean_cpu_share(), placement.last_cpu_share(),
                        FormatByteSize(static_cast<double>(placement.streamed_bytes())));
  absl::StrAppendFormat(&text, "kv bytes: device %s, stream %s, swing %s, host %s; spilled %s\n",
                        FormatByteSize(static_cast<double>(placement.device_bytes())),
                        FormatByteSize(static_cast<double>(placement.stream_bytes())),
                        FormatByteSize(static_cast<double>(placement.swing_bytes())),
                        FormatByteSize(static_cast<double>(placement.host_bytes())),
                        part(spilled, bytes));
  return text;
}

StreamingResult StreamAnswer(const ClientOptions& client, const v1::GenerateRequest& request,
                             const StreamingOptions& options) {
  StreamingResult result;
  auto stub = v1::GenerationService::NewStub(Connect(client.address));
  grpc::ClientContext context;
  SetDeadline(context, client.timeout_span);
  ProgressLine progress;
  v1::GenerateResponse message;
  v1::GenerateResponse last;
  grpc::Status status;
  bool interrupted = false;
  const absl::Time start = absl::Now();
  {
    const InterruptWatcher watcher([&context] { context.TryCancel(); });
    auto reader = stub->Generate(&context, request);
    while (reader->Read(&message)) {
      if (message.has_progress()) ShowProgress(message.progress(), &progress);
      if (!message.text().empty() || message.token_ids_size() > 0 || message.has_finish()) {
        progress.Clear();
        PrintAnswer(message, options);
        if (options.print_logprobs) PrintLogprobs(message);
        result.text += message.text();
      }
      last = message;
    }
    status = reader->Finish();
    interrupted = watcher.interrupted();
  }
  progress.Clear();
  if ((options.print_token_ids && last.usage().generated_tokens() > 0) ||
      (!result.text.empty() && result.text.back() != '\n')) {
    std::printf("\n");
  }
  std::fflush(stdout);
  if (interrupted) {
    std::fprintf(stderr, "interrupted: the request is cancelled\n");
    result.exit_code = kExitInterrupted;
    return result;
  }
  if (!status.ok()) {
    result.exit_code = ReportError(status, client.address);
    return result;
  }
  result.finish = last.finish();
  if (options.report) {
    std::fprintf(stderr, "%stook %s\n",
                 FormatReport(last.placement(), last.usage(), last.finish()).c_str(),
                 FormatSpan(absl::Now() - start).c_str());
  }
  return result;
}

}  // namespace writescope::cli
