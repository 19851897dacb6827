#include "server/cli/client.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <limits>
#include <thread>
#include <utility>

#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "server/status_mapping.h"

namespace writescope::cli {
namespace {

// While a long prompt is read nothing but these tells a slow worker from a dead machine.
constexpr int kKeepaliveMilliseconds = 20'000;

}  // namespace

std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMilliseconds);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

void SetDeadline(grpc::ClientContext& context, absl::Duration timeout) {
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
}

int ReportError(const grpc::Status& status, const std::string& address) {
  const server::ErrorDescription error = server::DescribeError(status);
  const std::string reason =
      error.reason.empty() || error.reason == error.code_name ? "" : " (" + error.reason + ")";
  std::fprintf(stderr, "error: %s%s: %s\n", error.code_name.c_str(), reason.c_str(),
               error.message.c_str());
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
      // With a reason it is a worker that says so.
      if (error.reason.empty()) {
        std::fprintf(stderr, "no worker answers at %s\n", address.c_str());
      }
      return kExitUnreachable;
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return kExitDeadline;
    case grpc::StatusCode::UNIMPLEMENTED:
      std::fprintf(stderr,
                   "what answers at %s is another service; --address is a worker's --listen, "
                   "--control-address its --control-listen\n",
                   address.c_str());
      return kExitRefused;
    default:
      return kExitRefused;
  }
}

int ReportLocalError(const std::string& message) {
  std::fprintf(stderr, "error: %s\n", message.c_str());
  return kExitLocal;
}

struct InterruptWatcher::State {
  std::atomic<bool> stopped{false};
  std::atomic<bool> interrupted{false};
  std::thread thread;
};

InterruptWatcher::InterruptWatcher(std::function<void()> on_interrupt)
    : state_(std::make_unique<State>()) {
  state_->thread = std::thread([state = state_.get(), on_interrupt = std::move(on_interrupt)] {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    const timespec poll = {.tv_sec = 0, .tv_nsec = 50'000'000};
    while (!state->stopped.load()) {
      if (sigtimedwait(&signals, nullptr, &poll) != SIGINT) continue;
      if (state->interrupted.exchange(true)) _exit(kExitInterrupted);
      on_interrupt();
    }
  });
}

InterruptWatcher::~InterruptWatcher() {
  state_->stopped.store(true);
  state_->thread.join();
}

bool InterruptWatcher::interrupted() const { return state_->interrupted.load(); }

}  // namespace writescope::cli
