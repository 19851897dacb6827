#include "engine/base/process.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include "engine/base/log.h"

namespace writescope {

namespace {

// Such as a thread that cannot be started: the library says no more than the exception's type.
[[noreturn]] void LogAndAbort() {
  std::string reason = "unknown";
  try {
    if (const std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const std::exception& exception) {
    reason = exception.what();
  } catch (...) {
  }
  Log(LogLevel::kError, "an exception ends the process", {{"error", reason}});
  std::abort();
}

}  // namespace

void PrepareProcess() {
  std::set_terminate(LogAndAbort);
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    // The lowest free number is `fd`: those below are open by now.
    if (fcntl(fd, F_GETFD) == -1) (void)open("/dev/null", O_RDWR);
  }
  for (const int signal_number : {SIGPIPE, SIGXFSZ}) signal(signal_number, SIG_IGN);
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  if (files.rlim_max < kFewDescriptors) {
    Log(LogLevel::kWarning, "few descriptors: a connection beyond them ends all accepting",
        {{"limit", static_cast<int64_t>(files.rlim_max)}, {"remedy", "raise ulimit -Hn"}});
  }
  rlimit addresses = {};
  if (getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY) {
    Log(LogLevel::kWarning,
        "addresses are limited: stacks and mapped files count too, and a thread that cannot be "
        "started ends the process",
        {{"limit_bytes", static_cast<uint64_t>(addresses.rlim_cur)},
         {"remedy", "ulimit -v unlimited; limit memory by cgroup"}});
  }
}

bool StdoutTaken() {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return true;
  const int error = errno;  // 0 where an earlier write failed.
  Log(LogLevel::kError, "the output could not be written",
      {{"error", error == 0 ? "an earlier write failed" : std::strerror(error)}});
  return false;
}

}  // namespace writescope
