// writescope generate: one prompt, one answer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/cli/client.h"
#include "writescope/v1/generation.pb.h"

namespace writescope::cli {

// What generate and chat have in common. Unset values are left to the worker.
struct SamplingFlags {
  std::optional<float> temperature;
  std::optional<uint32_t> top_k;
  std::optional<float> top_p;
  std::optional<float> min_p;
  std::optional<uint64_t> seed;
  std::optional<float> repetition_penalty;
  std::optional<float> presence_penalty;
  std::optional<float> frequency_penalty;
  std::optional<uint32_t> max_tokens;
  std::optional<uint32_t> min_tokens;
  std::vector<std::string> stop;
  std::vector<uint32_t> stop_token_ids;
  bool ignore_eos = false;
};

void FillSampling(const SamplingFlags& flags, v1::GenerateRequest* request);

struct GenerateFlags {
  std::string prompt;       // "-" or empty: stdin
  std::string prompt_file;  // Instead of `prompt`
  bool token_ids = false;   // Prompt and answer are token ids.
  bool allow_special = false;
  bool keep_special = false;
  bool no_bos = false;
  bool report = false;
  std::string request_id;
  std::optional<uint32_t> logprobs;
  SamplingFlags sampling;
};

int RunGenerate(const ClientOptions& client, const GenerateFlags& flags);

// Numbers between spaces, commas and line ends.
absl::StatusOr<std::vector<uint32_t>> ParseTokenIds(const std::string& text);
// A whole file, or stdin for "-".
absl::StatusOr<std::string> ReadText(const std::string& path);

}  // namespace writescope::cli
