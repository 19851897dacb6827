// Runs one Generate call and shows it: progress on stderr, text on stdout.
#pragma once

#include <string>

#include "server/cli/client.h"
#include "writescope/v1/generation.pb.h"

namespace writescope::cli {

struct StreamingOptions {
  bool print_token_ids = false;  // Instead of the text.
  bool report = false;           // The placement report, on stderr, at the end.
  bool print_logprobs = false;   // One line a token on stderr.
};

struct StreamingResult {
  int exit_code = kExitOk;
  std::string text;
  v1::Finish finish;
};

StreamingResult StreamAnswer(const ClientOptions& client, const v1::GenerateRequest& request,
                             const StreamingOptions& options);

// For people, several lines.
std::string FormatReport(const v1::PlacementReport& placement, const v1::Usage& usage,
                         const v1::Finish& finish);

}  // namespace writescope::cli
