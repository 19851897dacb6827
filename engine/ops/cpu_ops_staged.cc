// Staged steps on the CPU device: the plain calls with the inputs of the step. A submission costs
// little here, so nothing is recorded.
#include "engine/base/check.h"
#include "engine/ops/cpu_ops_impl.h"

namespace writescope::ops {

bool CpuOps::StageStep(const StepInputs& inputs) {
  staged_[inputs.step].Assign(inputs);
  return false;
}

void CpuOps::EmbedStaged(int step, const Matrix& table, void* out) {
  Embed(staged_[step].tokens(), table, out);
}

void CpuOps::AttendStaged(const StagedAttendArgs& args) {
  StagedStep& step = staged_[args.step];
  ResetAttention(step.num_rows(), step.num_heads(), step.kv().v_dim, args.state);
  Attend(step.AttendArgsOf(args.layer, args.q, args.state));
  MergeAttention({.kv = step.kv(),
                  .num_rows = step.num_rows(),
                  .num_heads = step.num_heads(),
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
