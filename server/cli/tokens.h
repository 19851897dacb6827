// writescope tokenize, detokenize, info and abort.
#pragma once

#include <string>

#include "server/cli/client.h"

namespace writescope::cli {

struct TokenizeFlags {
  std::string text;  // "-" or empty: stdin
  std::string file;
  bool allow_special = false;
  bool no_bos = false;
  bool pieces = false;  // Each id with its bytes, one a line.
};
int RunTokenize(const ClientOptions& client, const TokenizeFlags& flags);

// `ids`: numbers; "-" or empty: stdin.
int RunDetokenize(const ClientOptions& client, const std::string& ids, bool keep_special);

int RunInfo(const ClientOptions& client);

int RunAbort(const ClientOptions& client, const std::string& request_id);

}  // namespace writescope::cli
