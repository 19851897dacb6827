// writescope chat: a conversation, in the checkpoint's own template.
#pragma once

#include <string>

#include "server/cli/client.h"
#include "server/cli/generate.h"

namespace writescope::cli {

struct ChatFlags {
  std::string system;
  bool no_thinking = false;
  bool report = false;
  SamplingFlags sampling;
};

// A line of stdin is a turn; "/reset" begins anew, "/exit" or the end of stdin ends. Refuses a
// checkpoint whose template is none that is known.
int RunChat(const ClientOptions& client, const ChatFlags& flags);

}  // namespace writescope::cli
