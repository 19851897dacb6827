#include "server/cli/generate.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/base/status_macros.h"
#include "engine/base/utf8.h"
#include "server/cli/streaming.h"

namespace writescope::cli {
namespace {

absl::StatusOr<v1::GenerateRequest> MakeRequest(const GenerateFlags& flags) {
  v1::GenerateRequest request;
  std::string prompt = flags.prompt;
  if (!flags.prompt_file.empty()) {
    ASSIGN_OR_RETURN(prompt, ReadText(flags.prompt_file));
  } else if (prompt.empty() || prompt == "-") {
    ASSIGN_OR_RETURN(prompt, ReadText("-"));
  }
  if (flags.token_ids) {
    ASSIGN_OR_RETURN(const std::vector<uint32_t> ids, ParseTokenIds(prompt));
    request.mutable_token_ids()->mutable_ids()->Assign(ids.begin(), ids.end());
  } else {
    if (!IsWholeUtf8(prompt)) {
      return absl::InvalidArgumentError("the prompt is not valid UTF-8");
    }
    if (flags.allow_special) {
      v1::PromptSegment* segment = request.mutable_segmented()->add_segments();
      segment->set_text(prompt);
      segment->set_allow_special(true);
    } else {
      request.set_text(prompt);
    }
  }
  request.set_request_id(flags.request_id);
  if (flags.no_bos) request.set_add_bos(false);
  if (flags.keep_special) request.set_keep_special_tokens(true);
  if (flags.logprobs.has_value()) request.mutable_logprobs()->set_logprobs(*flags.logprobs);
  FillSampling(flags.sampling, &request);
  return request;
}

}  // namespace

void FillSampling(const SamplingFlags& flags, v1::GenerateRequest* request) {
  v1::SamplingParams* sampling = request->mutable_sampling();
  if (flags.temperature.has_value()) sampling->set_temperature(*flags.temperature);
  if (flags.top_k.has_value()) sampling->set_top_k(*flags.top_k);
  if (flags.top_p.has_value()) sampling->set_top_p(*flags.top_p);
  if (flags.min_p.has_value()) sampling->set_min_p(*flags.min_p);
  if (flags.seed.has_value()) sampling->set_seed(*flags.seed);
  if (flags.repetition_penalty.has_value()) {
    sampling->set_repetition_penalty(*flags.repetition_penalty);
  }
  if (flags.presence_penalty.has_value()) sampling->set_presence_penalty(*flags.presence_penalty);
  if (flags.frequency_penalty.has_value()) {
    sampling->set_frequency_penalty(*flags.frequency_penalty);
  }
  v1::StoppingParams* stopping = request->mutable_stopping();
  if (flags.max_tokens.has_value()) stopping->set_max_tokens(*flags.max_tokens);
  if (flags.min_tokens.has_value()) stopping->set_min_tokens(*flags.min_tokens);
  stopping->mutable_stop()->Assign(flags.stop.begin(), flags.stop.end());
  stopping->mutable_stop_token_ids()->Assign(flags.stop_token_ids.begin(),
                                             flags.stop_token_ids.end());
  if (flags.ignore_eos) stopping->set_ignore_eos(true);
}

absl::StatusOr<std::vector<uint32_t>> ParseTokenIds(const std::string& text) {
  std::vector<uint32_t> ids;
  for (const auto& word : absl::StrSplit(text, absl::ByAnyChar(", \t\r\n"), absl::SkipEmpty())) {
    uint32_t id = 0;
    if (!absl::SimpleAtoi(word, &id)) {
      return absl::InvalidArgumentError(absl::StrCat("'", word, "' is no token id"));
    }
    ids.push_back(id);
  }
  return ids;
}

absl::StatusOr<std::string> ReadText(const std::string& path) {
  struct Closer {
    void operator()(std::FILE* file) const {
      if (file != stdin) std::fclose(file);
    }
  };
  const std::unique_ptr<std::FILE, Closer> file(path == "-" ? stdin
                                                            : std::fopen(path.c_str(), "rb"));
  if (file == nullptr) {
    return absl::NotFoundError(absl::StrCat("cannot open ", path, ": ", std::strerror(errno)));
  }
  std::string text;
  char buffer[1 << 16];
  size_t size = 0;
  while ((size = std::fread(buffer, 1, sizeof(buffer), file.get())) > 0) text.append(buffer, size);
  if (std::ferror(file.get()) != 0) {
    return absl::DataLossError(absl::StrCat("cannot read ", path, ": ", std::strerror(errno)));
  }
  return text;
}

int RunGenerate(const ClientOptions& client, const GenerateFlags& flags) {
  const absl::StatusOr<v1::GenerateRequest> request = MakeRequest(flags);
  if (!request.ok()) return ReportLocalError(std::string(request.status().message()));
  return StreamAnswer(client, *request,
                      {.print_token_ids = flags.token_ids,
                       .report = flags.report,
                       .print_logprobs = flags.logprobs.has_value()})
      .exit_code;
}

}  // namespace writescope::cli
