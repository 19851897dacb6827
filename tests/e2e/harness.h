// Starts the programs as child processes, for end-to-end tests: free ports, captured output, an
// end.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace writescope::e2e {

// A running program. Its stdout and stderr are read, in one text, until it ends. Thread-safe.
class ChildProcess {
 public:
  // `arguments` without the program's own name.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const std::string& program,
                                                             std::vector<std::string> arguments);
  // Ends it with SIGKILL if it still runs.
  ~ChildProcess();

  // The first whole line that begins with `prefix`, old lines included. DEADLINE_EXCEEDED or, when
  // the program ended, ABORTED; both with the output's end.
  absl::StatusOr<std::string> AwaitLine(std::string_view prefix,
                                        absl::Duration timeout = absl::Seconds(60));
  std::string output() const;
  // Until both of its streams are closed; they may outlive the program for a moment.
  void AwaitOutputEnd(absl::Duration timeout);

  void Signal(int signal);
  // The exit code, or 128 + the signal that ended it. DEADLINE_EXCEEDED when it goes on.
  absl::StatusOr<int> AwaitExit(absl::Duration timeout = absl::Seconds(60));
  // SIGKILL, and waits.
  void Kill();
  bool running();
  pid_t pid() const { return pid_; }
  void WriteInput(std::string_view text);
  void CloseInput();

 private:
  ChildProcess() = default;
  void ReadOutput(int fd);
  bool TryReap() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  pid_t pid_ = -1;
  int input_fd_ = -1;
  std::thread reader_;
  mutable absl::Mutex mutex_;
  std::string output_ ABSL_GUARDED_BY(mutex_);
  bool output_ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool reaped_ ABSL_GUARDED_BY(mutex_) = false;
  int exit_code_ ABSL_GUARDED_BY(mutex_) = -1;
};

// A finished program.
struct RunResult {
  int exit_code = -1;
  std::string output;  // Of both streams.
};
// `input` is its stdin. An error when it does not end in time.
absl::StatusOr<RunResult> RunProgram(const std::string& program, std::vector<std::string> arguments,
                                     const std::string& input = "",
                                     absl::Duration timeout = absl::Seconds(60));

// A worker with all ports chosen freely, and its addresses.
struct WorkerProcess {
  std::unique_ptr<ChildProcess> process;
  std::string generation;
  std::string control;
  std::string metrics;
};
// `program` prints LISTENING and READY as writescope-worker does. Returns when it is ready. The
// listen flags are added to `flags` unless `flags` has them.
absl::StatusOr<WorkerProcess> StartWorker(const std::string& program,
                                          std::vector<std::string> flags,
                                          absl::Duration timeout = absl::Seconds(120));

// Whether the health service at `address` says SERVING for `service` before the timeout.
bool AwaitServing(const std::string& address, const std::string& service,
                  absl::Duration timeout = absl::Seconds(60));

// A port of the loopback address that was free a moment ago, for programs that cannot choose.
int FreePort();

}  // namespace writescope::e2e
