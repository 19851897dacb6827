#include "engine/base/process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <stdexcept>
#include <thread>

namespace writescope {
namespace {

// In a child of its own: 0 when all is as it should be.
int RunPrepared() {
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return 2;
  files.rlim_cur = 32;
  setrlimit(RLIMIT_NOFILE, &files);
  close(STDIN_FILENO);
  close(STDOUT_FILENO);
  PrepareProcess();
  if (fcntl(STDIN_FILENO, F_GETFD) == -1 || fcntl(STDOUT_FILENO, F_GETFD) == -1) return 3;
  const int next = open("/dev/null", O_RDONLY);
  if (next <= STDERR_FILENO) return 4;
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur != files.rlim_max) return 5;
  return 0;
}

int RunWithFewDescriptors() {
  const rlimit files = {100, 100};
  setrlimit(RLIMIT_NOFILE, &files);
  PrepareProcess();
  return 0;
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // They need more addresses.
int RunWithFewAddresses() {
  const rlimit addresses = {rlim_t{1} << 40, rlim_t{1} << 40};
  setrlimit(RLIMIT_AS, &addresses);
  PrepareProcess();
  return 0;
}
#endif

void ThrowPrepared() {
  PrepareProcess();
  std::thread([] { throw std::runtime_error("out of luck"); }).join();
}

// Writes a byte into a pipe without a reader, and one behind the limit of a file's size.
int WriteInVain() {
  PrepareProcess();
  int ends[2];
  if (pipe(ends) != 0) return 2;
  close(ends[0]);
  if (write(ends[1], "x", 1) != -1 || errno != EPIPE) return 3;
  char path[] = "/tmp/process_test.XXXXXX";
  const int fd = mkstemp(path);
  unlink(path);
  const rlimit none = {0, 0};
  setrlimit(RLIMIT_FSIZE, &none);
  if (write(fd, "x", 1) != -1 || errno != EFBIG) return 4;
  return 0;
}

TEST(ProcessDeathTest, WritesThatFailEndNothing) {
  EXPECT_EXIT(std::_Exit(WriteInVain()), testing::ExitedWithCode(0), "");
}

TEST(ProcessDeathTest, AHardLimitThatIsSmallIsSaid) {
  EXPECT_EXIT(std::_Exit(RunWithFewDescriptors()), testing::ExitedWithCode(0),
              "few descriptors.*limit=100");
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(ProcessDeathTest, ALimitOfAddressesIsSaid) {
  EXPECT_EXIT(std::_Exit(RunWithFewAddresses()), testing::ExitedWithCode(0),
              "addresses are limited.*limit_bytes=1099511627776");
}
#endif

TEST(ProcessDeathTest, AnExceptionIsLoggedBeforeItEndsTheProcess) {
  EXPECT_EXIT(ThrowPrepared(), testing::KilledBySignal(SIGABRT), "error=\"out of luck\"");
}

TEST(ProcessDeathTest, StandardStreamsAreOpenAndDescriptorsAreMany) {
  EXPECT_EXIT(std::_Exit(RunPrepared()), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace writescope
