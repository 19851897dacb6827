#include "server/cli/status.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "engine/base/finish_stream.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/cli/terminal.h"
#include "server/parse_units.h"
#include "server/time_convert.h"
#include "writescope/v1/control.grpc.pb.h"

namespace writescope::cli {
namespace {

using server::FormatByteSize;

constexpr int kBarWidth = 24;

double Ratio(double a, double b) { return b > 0 ? a / b : 0; }

std::string RegionText(const v1::RegionState& region) {
  constexpr std::array<const char*, 5> kNames = {"?", "device", "stream", "swing", "host"};
  const auto capacity = static_cast<double>(region.capacity_bytes());
  const auto used = static_cast<double>(region.used_bytes());
  const auto cached = static_cast<double>(region.cached_bytes());
  const auto index = static_cast<size_t>(std::clamp<int>(region.region(), 0, 4));
  std::string text = absl::StrFormat("  %-7s%s %s of %s", kNames[index],
                                     Bar(Ratio(used + cached, capacity), kBarWidth),
                                     FormatByteSize(used), FormatByteSize(capacity));
  if (cached > 0) absl::StrAppend(&text, ", and ", FormatByteSize(cached), " cached");
  if (region.retained_bytes() > 0) {
    absl::StrAppend(&text, ", ", FormatByteSize(static_cast<double>(region.retained_bytes())),
                    " copies");
  }
  return text + "\n";
}

std::string ShareText(const v1::ShareState& share) {
  std::string owner = "the worker's own roofline";
  if (!share.controller_id().empty()) {
    owner = absl::StrCat("controller ", share.controller_id(), ", generation ", share.generation(),
                         ", lease ends in ", FormatSpan(server::FromProto(share.expires_in())));
  }
  return absl::StrFormat("share      allowed %.2f to %.2f; table of %s\n", share.min_cpu_share(),
                         share.max_cpu_share(), owner);
}

std::string SplitText(const StepSummary& steps) {
  if (steps.steps == 0) return "split      no decode step yet\n";
  const double all = steps.cpu_bytes + steps.link_bytes + steps.resident_bytes;
  std::string text =
      absl::StrFormat("split      share observed %.3f, planned %.3f; spilled %s a step; batch %d\n",
                      steps.observed_share, steps.planned_share,
                      FormatByteSize(steps.spilled_bytes / steps.steps), steps.batch_size);
  absl::StrAppendFormat(&text, "  %-7s%s %s of the bytes, %s a step, %s while busy\n", "CPU",
                        Bar(Ratio(steps.cpu_bytes, all), kBarWidth),
                        FormatPercent(Ratio(steps.cpu_bytes, all)),
                        FormatByteSize(steps.cpu_bytes / steps.steps),
                        FormatRate(Ratio(steps.cpu_bytes, steps.cpu_busy_seconds)));
  absl::StrAppendFormat(&text, "  %-7s%s %s of the bytes, %s streamed and %s resident, link %s\n",
                        "GPU", Bar(Ratio(steps.link_bytes + steps.resident_bytes, all), kBarWidth),
                        FormatPercent(Ratio(steps.link_bytes + steps.resident_bytes, all)),
                        FormatByteSize(steps.link_bytes / steps.steps),
                        FormatByteSize(steps.resident_bytes / steps.steps),
                        FormatRate(Ratio(steps.link_bytes, steps.link_busy_seconds)));
  absl::StrAppendFormat(&text, "  step   %s, predicted %s",
                        FormatSpan(absl::Seconds(steps.step_seconds / steps.steps)),
                        FormatSpan(absl::Seconds(steps.predicted_seconds / steps.steps)));
  if (steps.seconds > 0) {
    absl::StrAppendFormat(&text, "; %.1f steps/s, %.1f tokens/s", steps.steps / steps.seconds,
                          steps.generated_tokens / steps.seconds);
  }
  return text + "\n";
}

class StatusSource {
 public:
  explicit StatusSource(const ClientOptions& client)
      : client_(client),
        stub_(v1::WorkerControlService::NewStub(Connect(client.control_address))) {}

  grpc::Status State(v1::GetWorkerStateResponse* state) {
    grpc::ClientContext context;
    SetDeadline(context, client_.timeout_span);
    return stub_->GetWorkerState(&context, {}, state);
  }
  v1::WorkerControlService::Stub& stub() { return *stub_; }

 private:
  const ClientOptions& client_;
  std::unique_ptr<v1::WorkerControlService::Stub> stub_;
};

int Watch(const ClientOptions& client, absl::Duration interval) {
  StatusSource source(client);
  grpc::ClientContext context;
  SetDeadline(context, client.timeout_span);
  auto reader = source.stub().WatchSteps(&context, {});
  absl::Mutex mutex;
  StepSummary current;
  StepSummary last;
  bool ended = false;
  std::thread collect([&] {
    v1::WatchStepsResponse message;
    while (reader->Read(&message)) {
      if (message.step().kind() != v1::STEP_KIND_DECODE) continue;
      absl::MutexLock lock(&mutex);
      current.Add(message.step());
    }
    absl::MutexLock lock(&mutex);
    ended = true;
  });
  int exit_code = kExitOk;
  {
    const InterruptWatcher watcher([&context] { context.TryCancel(); });
    const bool redraw = StdoutIsTerminal();
    while (exit_code == kExitOk) {
      v1::GetWorkerStateResponse state;
      const grpc::Status status = source.State(&state);
      if (!status.ok()) {
        exit_code = ReportError(status, client.control_address);
        break;
      }
      StepSummary shown;
      {
        absl::MutexLock lock(&mutex);
        current.seconds = absl::ToDoubleSeconds(interval);
        if (current.steps > 0) last = current;
        current = {};
        shown = last;
      }
      if (shown.steps == 0 && state.has_last_decode_step()) shown.Add(state.last_decode_step());
      std::printf("%s%s%s", redraw ? "\033[H\033[2J" : "", FormatStatus(state, shown).c_str(),
                  redraw ? "" : "\n");
      std::fflush(stdout);
      absl::MutexLock lock(&mutex);
      mutex.AwaitWithTimeout(absl::Condition(&ended), interval);
      if (ended) break;
    }
    if (watcher.interrupted()) exit_code = kExitInterrupted;
  }
  if (exit_code != kExitOk) context.TryCancel();
  collect.join();
  const grpc::Status status = FinishStream(*reader, context);
  if (exit_code == kExitOk) exit_code = ReportError(status, client.control_address);
  return exit_code;
}

}  // namespace

void StepSummary::Add(const v1::StepTelemetry& step) {
  ++steps;
  cpu_bytes += static_cast<double>(step.cpu_bytes());
  link_bytes += static_cast<double>(step.link_bytes());
  resident_bytes += static_cast<double>(step.resident_bytes());
  spilled_bytes += static_cast<double>(step.spilled_bytes());
  cpu_busy_seconds += step.cpu_busy_seconds();
  link_busy_seconds += step.link_busy_seconds();
  step_seconds += step.step_seconds();
  predicted_seconds += step.predicted_step_seconds();
  generated_tokens += step.batch_size();
  batch_size = step.batch_size();
  observed_share = step.observed_cpu_share();
  planned_share = step.planned_cpu_share();
}

std::string FormatStatus(const v1::GetWorkerStateResponse& state, const StepSummary& steps) {
  const absl::Duration up = absl::Now() - server::FromProto(state.start_time());
  std::string text =
      absl::StrFormat("worker     %s, %s on %s, %s for %s\n", state.worker_id(),
                      state.model().empty() ? "no model yet" : state.model(),
                      state.device().empty() ? "?" : state.device(), state.phase(), FormatSpan(up));
  absl::StrAppendFormat(
      &text, "requests   %d running, %d waiting; %d steps; prefix cache %d of %d tokens\n",
      state.running_requests(), state.waiting_requests(), state.steps_total(),
      state.prefix_hit_tokens_total(), state.prefix_query_tokens_total());
  absl::StrAppend(&text, ShareText(state.share()), SplitText(steps));
  absl::StrAppend(&text, "regions    moved bytes: ", state.moved_bytes_total(), "\n");
  for (const v1::RegionState& region : state.regions()) absl::StrAppend(&text, RegionText(region));
  absl::StrAppendFormat(&text, "engine     cut %s, %d CPU workers", state.cut(),
                        state.cpu_workers());
  if (state.link_simulated()) {
    absl::StrAppend(&text, ", link simulated",
                    state.link_pace_bytes_per_second() > 0
                        ? " at " + FormatRate(state.link_pace_bytes_per_second())
                        : " without a pace");
  }
  return text + "\n";
}

int RunStatus(const ClientOptions& client, bool watch, absl::Duration interval) {
  if (watch) return Watch(client, interval);
  StatusSource source(client);
  v1::GetWorkerStateResponse state;
  const grpc::Status status = source.State(&state);
  if (!status.ok()) return ReportError(status, client.control_address);
  StepSummary last;
  if (state.has_last_decode_step()) last.Add(state.last_decode_step());
  std::fputs(FormatStatus(state, last).c_str(), stdout);
  return kExitOk;
}

int RunHealth(const ClientOptions& client, const std::string& service) {
  auto stub = grpc::health::v1::Health::NewStub(Connect(client.address));
  grpc::ClientContext context;
  SetDeadline(context, client.timeout_span);
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  grpc::health::v1::HealthCheckResponse response;
  const grpc::Status status = stub->Check(&context, request, &response);
  if (!status.ok()) return ReportError(status, client.address);
  std::printf("%s\n",
              grpc::health::v1::HealthCheckResponse::ServingStatus_Name(response.status()).c_str());
  return response.status() == grpc::health::v1::HealthCheckResponse::SERVING ? kExitOk
                                                                             : kExitUnreachable;
}

}  // namespace writescope::cli
