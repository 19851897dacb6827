#include "tests/e2e/harness.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "engine/base/status_macros.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"

extern char** environ;

namespace writescope::e2e {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(5);

// The end of a long output, for messages.
std::string Tail(const std::string& text) {
  constexpr size_t kBytes = 4000;
  return text.size() <= kBytes ? text : "..." + text.substr(text.size() - kBytes);
}

// Starts the program with pipes for its streams.
absl::StatusOr<pid_t> Spawn(const std::string& program, std::vector<std::string>& arguments,
                            int input_fd, int output_fd) {
  std::vector<char*> argv = {const_cast<char*>(program.c_str())};
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input_fd, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output_fd, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output_fd, STDERR_FILENO);
  // The program starts with the signals of a shell's child, whatever this process blocks or
  // ignores.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t signals;
  sigemptyset(&signals);
  posix_spawnattr_setsigmask(&attributes, &signals);
  sigaddset(&signals, SIGPIPE);
  posix_spawnattr_setsigdefault(&attributes, &signals);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  pid_t pid = -1;
  const int error = posix_spawn(&pid, program.c_str(), &actions, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    return absl::NotFoundError(absl::StrCat("cannot start ", program, ": ", std::strerror(error)));
  }
  return pid;
}

bool HasFlag(const std::vector<std::string>& flags, const std::string& name) {
  for (const std::string& flag : flags) {
    if (flag == name || absl::StartsWith(flag, name + "=")) return true;
  }
  return false;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(
    const std::string& program, std::vector<std::string> arguments) {
  int input[2];
  int output[2];
  if (pipe2(input, O_CLOEXEC) != 0) {
    return absl::InternalError(absl::StrCat("pipe: ", std::strerror(errno)));
  }
  if (pipe2(output, O_CLOEXEC) != 0) {
    close(input[0]);
    close(input[1]);
    return absl::InternalError(absl::StrCat("pipe: ", std::strerror(errno)));
  }
  const absl::StatusOr<pid_t> pid = Spawn(program, arguments, input[0], output[1]);
  close(input[0]);
  close(output[1]);
  if (!pid.ok()) {
    close(input[1]);
    close(output[0]);
    return pid.status();
  }
  std::unique_ptr<ChildProcess> child(new ChildProcess());
  child->pid_ = *pid;
  child->input_fd_ = input[1];
  child->reader_ = std::thread([raw = child.get(), fd = output[0]] { raw->ReadOutput(fd); });
  return child;
}

ChildProcess::~ChildProcess() {
  CloseInput();
  Kill();
  reader_.join();
}

void ChildProcess::ReadOutput(int fd) {
  char buffer[1 << 14];
  while (true) {
    const ssize_t size = read(fd, buffer, sizeof(buffer));
    if (size < 0 && errno == EINTR) continue;
    absl::MutexLock lock(&mutex_);
    if (size <= 0) {
      output_ended_ = true;
      break;
    }
    output_.append(buffer, static_cast<size_t>(size));
  }
  close(fd);
}

absl::StatusOr<std::string> ChildProcess::AwaitLine(std::string_view prefix,
                                                    absl::Duration timeout) {
  const absl::Time end = absl::Now() + timeout;
  const std::string start(prefix);
  while (true) {
    std::string text;
    bool ended = false;
    {
      absl::MutexLock lock(&mutex_);
      text = output_;
      ended = output_ended_;
    }
    const size_t whole = text.rfind('\n');
    for (const absl::string_view line :
         absl::StrSplit(text.substr(0, whole == std::string::npos ? 0 : whole), '\n')) {
      if (absl::StartsWith(line, start)) return std::string(line);
    }
    const std::string what = absl::StrCat("no line '", start, "...' in:\n", Tail(text));
    if (ended) return absl::AbortedError("the program ended; " + what);
    if (absl::Now() >= end) return absl::DeadlineExceededError(what);
    absl::SleepFor(kPoll);
  }
}

std::string ChildProcess::output() const {
  absl::MutexLock lock(&mutex_);
  return output_;
}

void ChildProcess::AwaitOutputEnd(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(&output_ended_), timeout);
}

bool ChildProcess::TryReap() {
  if (reaped_) return true;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return false;
  reaped_ = true;
  exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return true;
}

void ChildProcess::Signal(int signal) {
  absl::MutexLock lock(&mutex_);
  if (!TryReap()) kill(pid_, signal);
}

absl::StatusOr<int> ChildProcess::AwaitExit(absl::Duration timeout) {
  const absl::Time end = absl::Now() + timeout;
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (TryReap()) return exit_code_;
      if (absl::Now() >= end) {
        return absl::DeadlineExceededError("the program goes on; output:\n" + Tail(output_));
      }
    }
    absl::SleepFor(kPoll);
  }
}

void ChildProcess::Kill() {
  Signal(SIGKILL);
  AwaitExit(absl::InfiniteDuration()).IgnoreError();
}

bool ChildProcess::running() {
  absl::MutexLock lock(&mutex_);
  return !TryReap();
}

void ChildProcess::WriteInput(std::string_view text) {
  while (!text.empty()) {
    const ssize_t size = write(input_fd_, text.data(), text.size());
    if (size < 0) {
      if (errno == EINTR) continue;
      return;  // It does not read any more; its exit code tells.
    }
    text.remove_prefix(static_cast<size_t>(size));
  }
}

void ChildProcess::CloseInput() {
  if (input_fd_ >= 0) close(std::exchange(input_fd_, -1));
}

absl::StatusOr<RunResult> RunProgram(const std::string& program, std::vector<std::string> arguments,
                                     const std::string& input, absl::Duration timeout) {
  signal(SIGPIPE, SIG_IGN);  // A program that ends before it has read all is no reason to die.
  ASSIGN_OR_RETURN(const std::unique_ptr<ChildProcess> child,
                   ChildProcess::Start(program, std::move(arguments)));
  child->WriteInput(input);
  child->CloseInput();
  RunResult result;
  ASSIGN_OR_RETURN(result.exit_code, child->AwaitExit(timeout));
  child->AwaitOutputEnd(absl::Seconds(5));
  result.output = child->output();
  return result;
}

absl::StatusOr<WorkerProcess> StartWorker(const std::string& program,
                                          std::vector<std::string> flags, absl::Duration timeout) {
  for (const char* name : {"--listen", "--control-listen", "--metrics-listen"}) {
    if (!HasFlag(flags, name)) flags.push_back(absl::StrCat(name, "=127.0.0.1:0"));
  }
  WorkerProcess worker;
  ASSIGN_OR_RETURN(worker.process, ChildProcess::Start(program, std::move(flags)));
  ASSIGN_OR_RETURN(const std::string listening, worker.process->AwaitLine("LISTENING ", timeout));
  for (const absl::string_view word : absl::StrSplit(listening, ' ')) {
    absl::string_view value = word;
    if (absl::ConsumePrefix(&value, "generation=")) worker.generation = std::string(value);
    if (absl::ConsumePrefix(&value, "control=")) worker.control = std::string(value);
    if (absl::ConsumePrefix(&value, "metrics=")) worker.metrics = std::string(value);
  }
  RETURN_IF_ERROR(worker.process->AwaitLine("READY", timeout).status());
  return worker;
}

bool AwaitServing(const std::string& address, const std::string& service, absl::Duration timeout) {
  auto stub = grpc::health::v1::Health::NewStub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  const absl::Time end = absl::Now() + timeout;
  while (absl::Now() < end) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(1)));
    context.set_wait_for_ready(true);
    grpc::health::v1::HealthCheckRequest request;
    request.set_service(service);
    grpc::health::v1::HealthCheckResponse response;
    if (stub->Check(&context, request, &response).ok() &&
        response.status() == grpc::health::v1::HealthCheckResponse::SERVING) {
      return true;
    }
    absl::SleepFor(absl::Milliseconds(20));
  }
  return false;
}

int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  int port = -1;
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0) {
    port = ntohs(address.sin_port);
  }
  close(fd);
  return port;
}

}  // namespace writescope::e2e
