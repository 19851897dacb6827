#include "engine/base/process.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>

#include "engine/base/log.h"

namespace writescope {

void PrepareProcess() {
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
}

}  // namespace writescope
