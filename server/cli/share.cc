#include "server/cli/share.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/cli/terminal.h"
#include "server/parse_units.h"
#include "server/time_convert.h"
#include "writescope/v1/control.grpc.pb.h"

namespace writescope::cli {
namespace {

// Ids that begin so go before any controller's; see SetCpuShareRequest.
constexpr char kOperatorPrefix[] = "operator:";
// Ends a lease without waiting for it.
constexpr absl::Duration kShortLease = absl::Milliseconds(1);

std::string OperatorId() {
  const char* user = std::getenv("USER");
  return absl::StrCat(kOperatorPrefix, user != nullptr && user[0] != '\0' ? user : "unknown");
}

std::string ShareStateText(const v1::ShareState& state) {
  std::string text;
  if (state.controller_id().empty()) {
    text = "in force   the worker's own roofline\n";
  } else {
    text = absl::StrFormat("in force   table of %s, generation %d, lease ends in %s\n",
                           state.controller_id(), state.generation(),
                           FormatSpan(server::FromProto(state.expires_in())));
  }
  absl::StrAppendFormat(&text, "allowed    %.3f to %.3f\nlast       %.3f\n", state.min_cpu_share(),
                        state.max_cpu_share(), state.last_cpu_share());
  for (const v1::ShareBucket& bucket : state.buckets()) {
    absl::StrAppendFormat(&text, "batch up to %d\n", bucket.max_batch());
    for (const v1::SharePoint& point : bucket.points()) {
      absl::StrAppendFormat(&text, "  %12s spilled  %.3f %s\n",
                            server::FormatByteSize(static_cast<double>(point.spilled_bytes())),
                            point.cpu_share(), Bar(point.cpu_share(), 20));
    }
  }
  return text;
}

class ShareClient {
 public:
  explicit ShareClient(const ClientOptions& client)
      : client_(client),
        stub_(v1::WorkerControlService::NewStub(Connect(client.control_address))) {}

  grpc::Status InForce(v1::ShareState* state) {
    v1::GetWorkerStateResponse response;
    grpc::ClientContext context;
    SetDeadline(context, client_.timeout_span);
    const grpc::Status status = stub_->GetWorkerState(&context, {}, &response);
    *state = response.share();
    return status;
  }

  // Offers with the next generation; tries again while others are faster.
  grpc::Status Offer(v1::SetCpuShareRequest request, v1::SetCpuShareResponse* response) {
    constexpr int kTries = 5;
    request.set_controller_id(OperatorId());
    grpc::Status status;
    for (int i = 0; i < kTries; ++i) {
      v1::ShareState state;
      status = InForce(&state);
      if (!status.ok()) return status;
      request.set_generation(state.generation() + 1);
      grpc::ClientContext context;
      SetDeadline(context, client_.timeout_span);
      status = stub_->SetCpuShare(&context, request, response);
      if (!status.ok() || response->outcome() != v1::SHARE_OUTCOME_STALE) break;
    }
    return status;
  }

  v1::WorkerControlService::Stub& stub() { return *stub_; }

 private:
  const ClientOptions& client_;
  std::unique_ptr<v1::WorkerControlService::Stub> stub_;
};

int Stale(const v1::ShareState& in_force) {
  std::fprintf(stderr, "error: not taken; the table of %s, generation %llu, was faster each time\n",
               in_force.controller_id().c_str(),
               static_cast<unsigned long long>(in_force.generation()));
  return kExitRefused;
}

}  // namespace

int RunShareShow(const ClientOptions& client) {
  ShareClient share(client);
  v1::ShareState state;
  const grpc::Status status = share.InForce(&state);
  if (!status.ok()) return ReportError(status, client.control_address);
  std::fputs(ShareStateText(state).c_str(), stdout);
  return kExitOk;
}

int RunShareSet(const ClientOptions& client, const ShareSetFlags& flags) {
  ShareClient share(client);
  v1::SetCpuShareRequest request;
  *request.mutable_valid_for() = server::ToProto(flags.valid_for);
  request.set_reason("set by an operator");
  v1::ShareBucket* bucket = request.add_buckets();
  bucket->set_max_batch(1);  // Larger batches use the last bucket, which is this.
  v1::SharePoint* point = bucket->add_points();
  point->set_spilled_bytes(1);
  point->set_cpu_share(flags.share);
  v1::SetCpuShareResponse response;
  const grpc::Status status = share.Offer(request, &response);
  if (!status.ok()) return ReportError(status, client.control_address);
  if (response.outcome() == v1::SHARE_OUTCOME_STALE) return Stale(response.in_force());
  const double in_force = response.in_force().buckets(0).points(0).cpu_share();
  std::printf("share %.3f for %s%s\n", in_force, FormatSpan(flags.valid_for).c_str(),
              response.outcome() == v1::SHARE_OUTCOME_CLAMPED
                  ? absl::StrFormat(" (clamped from %.3f: the placement allows %.3f to %.3f)",
                                    flags.share, response.in_force().min_cpu_share(),
                                    response.in_force().max_cpu_share())
                        .c_str()
                  : "");
  return kExitOk;
}

int RunShareRelease(const ClientOptions& client) {
  ShareClient share(client);
  v1::ShareState state;
  grpc::Status status = share.InForce(&state);
  if (!status.ok()) return ReportError(status, client.control_address);
  if (!absl::StartsWith(state.controller_id(), kOperatorPrefix)) {
    std::printf("no operator's lease runs\n");
    return kExitOk;
  }
  v1::SetCpuShareRequest request;
  *request.mutable_valid_for() = server::ToProto(kShortLease);
  *request.mutable_buckets() = state.buckets();
  request.set_reason("released by an operator");
  v1::SetCpuShareResponse response;
  status = share.Offer(request, &response);
  if (!status.ok()) return ReportError(status, client.control_address);
  if (response.outcome() == v1::SHARE_OUTCOME_STALE) return Stale(response.in_force());
  std::printf(
      "released; the worker's own roofline is in force until a controller offers a table\n");
  return kExitOk;
}

int RunLinkPace(const ClientOptions& client, double bytes_per_s) {
  ShareClient share(client);
  v1::SetLinkPaceRequest request;
  request.set_bytes_per_second(bytes_per_s);
  v1::SetLinkPaceResponse response;
  grpc::ClientContext context;
  SetDeadline(context, client.timeout_span);
  const grpc::Status status = share.stub().SetLinkPace(&context, request, &response);
  if (!status.ok()) return ReportError(status, client.control_address);
  std::printf("simulated link: %s, before %s\n",
              bytes_per_s > 0 ? FormatRate(bytes_per_s).c_str() : "no pace",
              response.previous_bytes_per_second() > 0
                  ? FormatRate(response.previous_bytes_per_second()).c_str()
                  : "no pace");
  return kExitOk;
}

}  // namespace writescope::cli
