// writescope-replay: a decision log against another policy.
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "controller/config.h"
#include "controller/replay.h"

namespace writescope::controller {
namespace {

int Main(int argc, char** argv) {
  const ParsedReplayConfig parsed =
      ParseReplayConfig(std::vector<std::string>(argv + 1, argv + argc));
  if (!parsed.config.has_value()) {
    std::fputs(parsed.message.c_str(), parsed.exit_code == 0 ? stdout : stderr);
    return parsed.exit_code;
  }
  std::ifstream log(parsed.config->path);
  if (!log) {
    std::fprintf(stderr, "%s cannot be opened\n", parsed.config->path.c_str());
    return 1;
  }
  const absl::StatusOr<Replay> replay = ReplayLog(log, parsed.config->policy);
  if (!replay.ok()) {
    std::fprintf(stderr, "%s: %s\n", parsed.config->path.c_str(),
                 std::string(replay.status().message()).c_str());
    return 1;
  }
  std::fputs(FormatReplay(*replay, parsed.config->rows).c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace writescope::controller

int main(int argc, char** argv) { return writescope::controller::Main(argc, argv); }
