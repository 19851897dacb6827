// Staged steps on the CPU device: the plain calls with the inputs of the step. A submission costs
// little here, so nothing is recorded.
#include "engine/base/check.h"
#include "engine/ops/cpu_ops_impl.h"

namespace writescope::ops {

bool CpuOps::StageStep(const StepInputs& inputs) {
  staged_.Assign(inputs);
  return false;
}

void CpuOps::EmbedStaged(const Matrix& table, void* out) { Embed(staged_.tokens(), table, out); }

void CpuOps::AttendStaged(const StagedAttendArgs& args) {
  ResetAttention(staged_.num_rows(), staged_.num_heads(), staged_.kv().v_dim, args.state);
  Attend(staged_.AttendArgsOf(args.layer, args.q, args.state));
  MergeAttention({.kv = staged_.kv(),
                  .num_rows = staged_.num_rows(),
                  .num_heads = staged_.num_heads(),
                  .out_dim = args.out_dim,
                  .state = args.state,
                  .out = args.out});
}

absl::Status CpuOps::BeginRecording() {
  return absl::UnimplementedError("the CPU device keeps no calls");
}

absl::StatusOr<std::unique_ptr<Recording>> CpuOps::EndRecording() {
  return absl::UnimplementedError("the CPU device keeps no calls");
}

void CpuOps::Replay(const Recording&) { CHECK(false) << "the CPU device keeps no calls"; }

}  // namespace writescope::ops
