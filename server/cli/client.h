// What every subcommand needs to call a worker: addresses, deadlines, errors in words, exit codes.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/status.h"

namespace writescope::cli {

// Documented in --help; scripts rely on them.
enum ExitCode {
  kExitOk = 0,
  kExitLocal = 1,        // Something on this side: a file, a terminal.
  kExitUsage = 2,        // Wrong flags.
  kExitRefused = 3,      // The worker refused or failed the request.
  kExitUnreachable = 4,  // No worker answered, or it is loading or draining.
  kExitDeadline = 5,     // --timeout passed.
  kExitInterrupted = 130,
};

struct ClientOptions {
  std::string address = "127.0.0.1:50051";
  std::string control_address = "127.0.0.1:50052";
  std::string timeout = "1h";
  // Of `timeout`; set by Check.
  absl::Duration timeout_span = absl::Hours(1);
};

std::shared_ptr<grpc::Channel> Connect(const std::string& address);

// Every call has a deadline: a client without one may wait for ever.
void SetDeadline(grpc::ClientContext& context, absl::Duration timeout);

// Prints "error: INVALID_ARGUMENT (EMPTY_PROMPT): ..." on stderr; the exit code that fits.
int ReportError(const grpc::Status& status, const std::string& address);
int ReportLocalError(const std::string& message);

// Runs `on_interrupt` once, on a thread of its own, when Ctrl-C is pressed during its life. SIGINT
// has to be blocked in the whole process (main does that). A second Ctrl-C ends the process.
class InterruptWatcher {
 public:
  explicit InterruptWatcher(std::function<void()> on_interrupt);
  ~InterruptWatcher();
  bool interrupted() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace writescope::cli
