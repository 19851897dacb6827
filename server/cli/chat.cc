#include "server/cli/chat.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "engine/base/utf8.h"
#include "engine/tokenizer/chat_template.h"
#include "server/cli/streaming.h"
#include "server/cli/terminal.h"
#include "writescope/v1/generation.grpc.pb.h"

namespace writescope::cli {
namespace {

using tokenizer::ChatMessage;
using tokenizer::ChatRole;
using tokenizer::ChatTemplate;

// The text of a special token, which the template may print.
grpc::Status TokenText(v1::GenerationService::Stub& stub, const ClientOptions& client, uint32_t id,
                       std::string* text) {
  v1::DetokenizeRequest request;
  request.add_token_ids(id);
  request.set_keep_special_tokens(true);
  v1::DetokenizeResponse response;
  grpc::ClientContext context;
  SetDeadline(context, client.timeout_span);
  const grpc::Status status = stub.Detokenize(&context, request, &response);
  *text = response.text();
  return status;
}

// Ctrl-C ends the program while it waits for a line, and only the answer while one is printed. No
// call runs in its scope: a thread started there would die of Ctrl-C for ever after.
class InterruptsAllowed {
 public:
  InterruptsAllowed() { Change(SIG_UNBLOCK); }
  ~InterruptsAllowed() { Change(SIG_BLOCK); }

 private:
  static void Change(int how) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(how, &signals, nullptr);
  }
};

bool ReadLine(bool interactive, std::string* line) {
  if (interactive) {
    std::fputs("> ", stderr);
    std::fflush(stderr);
  }
  const InterruptsAllowed allowed;
  return static_cast<bool>(std::getline(std::cin, *line));
}

class Conversation {
 public:
  Conversation(const ClientOptions& client, const ChatFlags& flags, ChatTemplate chat_template)
      : client_(client), flags_(flags), template_(std::move(chat_template)) {
    Reset();
  }

  void Reset() {
    messages_.clear();
    if (!flags_.system.empty()) messages_.push_back({ChatRole::kSystem, flags_.system});
  }

  int Turn(const std::string& line) {
    messages_.push_back({ChatRole::kUser, line});
    const auto segments = template_.Render(messages_, {.enable_thinking = !flags_.no_thinking});
    if (!segments.ok()) return ReportLocalError(std::string(segments.status().message()));
    v1::GenerateRequest request;
    for (const tokenizer::Segment& segment : *segments) {
      v1::PromptSegment* out = request.mutable_segmented()->add_segments();
      out->set_text(segment.text);
      out->set_allow_special(segment.allow_special);
    }
    request.set_add_bos(false);  // The template has it where it is wanted.
    FillSampling(flags_.sampling, &request);
    StreamingResult result = StreamAnswer(client_, request, {.report = flags_.report});
    if (result.exit_code != kExitOk && result.exit_code != kExitInterrupted) {
      messages_.pop_back();  // As if the line had not been said.
      return result.exit_code;
    }
    messages_.push_back({ChatRole::kAssistant, std::move(result.text)});
    return result.exit_code == kExitInterrupted ? kExitOk : result.exit_code;
  }

 private:
  const ClientOptions& client_;
  const ChatFlags& flags_;
  const ChatTemplate template_;
  std::vector<ChatMessage> messages_;
};

// What a conversation needs to know of the model; an exit code other than kExitOk when it cannot
// be.
int LoadTemplate(const ClientOptions& client, std::string* model,
                 std::optional<ChatTemplate>* chat_template) {
  const InterruptWatcher watcher([] { _exit(kExitInterrupted); });
  auto stub = v1::GenerationService::NewStub(Connect(client.address));
  v1::GetModelInfoResponse info;
  {
    grpc::ClientContext context;
    SetDeadline(context, client.timeout_span);
    const grpc::Status status = stub->GetModelInfo(&context, {}, &info);
    if (!status.ok()) return ReportError(status, client.address);
  }
  if (!info.has_tokenizer()) {
    return ReportLocalError(absl::StrCat(info.model(), " has no tokenizer; chat needs one"));
  }
  if (info.chat_template().empty()) {
    return ReportLocalError(
        absl::StrCat(info.model(), " has no chat template: use 'writescope generate'"));
  }
  std::string bos;
  std::string eos;
  if (info.has_bos_token_id()) {
    const grpc::Status status = TokenText(*stub, client, info.bos_token_id(), &bos);
    if (!status.ok()) return ReportError(status, client.address);
  }
  if (info.eos_token_ids_size() > 0) {
    const grpc::Status status = TokenText(*stub, client, info.eos_token_ids(0), &eos);
    if (!status.ok()) return ReportError(status, client.address);
  }
  absl::StatusOr<ChatTemplate> matched =
      ChatTemplate::Match(info.chat_template(), std::move(bos), std::move(eos));
  if (!matched.ok()) {
    return ReportLocalError(absl::StrCat("the chat template of ", info.model(),
                                         " is not one that is built in, and a wrong one would make "
                                         "answers worse without a sign: ",
                                         matched.status().message()));
  }
  *model = info.model();
  *chat_template = *std::move(matched);
  return kExitOk;
}

}  // namespace

int RunChat(const ClientOptions& client, const ChatFlags& flags) {
  std::string model;
  std::optional<ChatTemplate> chat_template;
  if (const int exit_code = LoadTemplate(client, &model, &chat_template); exit_code != kExitOk) {
    return exit_code;
  }
  const bool interactive = isatty(STDIN_FILENO) != 0;
  if (interactive) {
    std::fprintf(stderr, "%s, template %s; /reset begins anew, /exit ends\n", model.c_str(),
                 std::string(chat_template->name()).c_str());
  }
  Conversation conversation(client, flags, *std::move(chat_template));
  std::string line;
  while (ReadLine(interactive, &line)) {
    if (line == "/exit") break;
    if (line == "/reset") {
      conversation.Reset();
      continue;
    }
    if (line.empty()) continue;
    if (!IsWholeUtf8(line)) return ReportLocalError("the line is not valid UTF-8");
    const int exit_code = conversation.Turn(line);
    if (exit_code == kExitOk) continue;
    if (!interactive) return exit_code;
    // A person keeps the conversation: the context may be full, or the worker away for a while.
    std::fputs("the line is left out of the conversation; /reset begins anew\n", stderr);
  }
  return kExitOk;
}

}  // namespace writescope::cli
